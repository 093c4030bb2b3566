"""The header Expect, and bodies that are refused before they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from support.api.api_server import Running, engine_replying, running
from support.api.credentials import alice_and_bob

BODY = b'{"prompt": "x"}'
JSON = b"Content-Type: application/json\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PATH = b"/v1/completions"


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    # The time for a refused body to arrive before the connection is closed is as short.
    async with running(engine_replying("Hello"), body_seconds=0.3) as server:
        yield server


def head(path: bytes, *headers: bytes, length: int = len(BODY), version: bytes = b"1.1") -> bytes:
    lines = (b"Host: x", b"Connection: close", b"Content-Length: %d" % length, *headers)
    return b"POST %s HTTP/%s\r\n" % (path, version) + b"".join(line + b"\r\n" for line in lines)


async def exchange(server: Running, sent: bytes) -> bytes:
    """Sends a head, and the body if it is invited; returns all that the server sends."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent + b"\r\n")
        received = b""
        while piece := await asyncio.wait_for(reader.read(1 << 16), 5):
            received += piece
            if received == CONTINUE:
                writer.write(BODY)
        return received
    finally:
        writer.close()


def expecting(value: bytes) -> bytes:
    return JSON + b"Expect: " + value


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue"])
async def test_a_body_is_invited(server: Running, value: bytes) -> None:
    reply = await exchange(server, head(PATH, expecting(value)))
    assert reply.startswith(CONTINUE + b"HTTP/1.1 200 ")
    assert reply.count(b"100 Continue") == 1
    assert b'"text":"Hello"' in reply


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(PATH, expecting(b"100-continue"), length=10**9), 413),
        (head(PATH, expecting(b"100-continue"), b"Content-Encoding: br"), 415),
        (head(PATH, b"Content-Type: text/plain\r\nExpect: 100-continue"), 415),
        (head(b"/nothing", expecting(b"100-continue")), 404),
        (head(b"/v1/models", expecting(b"100-continue")), 405),
        (head(b"/v1/files", expecting(b"100-continue")), 400),
        (head(PATH, JSON.strip(), length=10**9), 413),
    ],
)
async def test_a_body_that_would_be_refused_is_not_invited(
    server: Running, sent: bytes, status: int
) -> None:
    reply = await exchange(server, sent)
    assert reply.startswith(b"HTTP/1.1 %d " % status), reply
    assert b"Connection: close" in reply


async def test_without_a_key_no_body_is_invited() -> None:
    async with running(engine_replying("Hello"), body_seconds=0.3, keys=alice_and_bob()) as server:
        reply = await exchange(server, head(PATH, expecting(b"100-continue")))
    assert reply.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", [PATH, b"/v1/messages", b"/api/chat", b"/infill", b"/nothing"])
@pytest.mark.parametrize("value", [b"tea", b"100-continue, tea", b"\xff"])
async def test_other_expectations(server: Running, path: bytes, value: bytes) -> None:
    reply = await exchange(server, head(path, expecting(value)) + b"\r\n" + BODY)
    assert reply.startswith(b"HTTP/1.1 417 ")
    assert b"X-Request-Id: " in reply
    body = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert isinstance(body["error"], str) == path.startswith(b"/api")
    assert (body.get("type") == "error") == (path == b"/v1/messages")
    assert "100-continue" in json.dumps(body)


async def test_http_1_0_has_no_expectations(server: Running) -> None:
    for value in (b"100-continue", b"tea"):
        sent = head(PATH, expecting(value), version=b"1.0") + b"\r\n" + BODY
        assert (await exchange(server, sent)).startswith(b"HTTP/1.0 200 ")


async def test_an_empty_body_is_called_empty(server: Running) -> None:
    for path in ("/v1/completions", "/v1/messages", "/api/chat", "/tokenize"):
        status, reply = await server.post(path, b"")
        assert status == 400
        assert "the body is empty" in json.dumps(reply)
