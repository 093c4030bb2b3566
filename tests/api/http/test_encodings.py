"""Compressed bodies: those that the server knows, those that it refuses, and bombs."""

from __future__ import annotations

import functools
import gzip
import json
import os
import zlib
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from support.api.api_server import MESSAGES, Running, engine_replying, running

from chairlift.api.http.encodings import decoded
from chairlift.api.server.routes import ROUTES, error_format_of
from chairlift.engine.errors import RequestError

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "x"}).encode()
MAX_BYTES = 1 << 20


@functools.cache
def huge() -> bytes:
    """More text than a server is ever sent; its compressed form is a thousandth of it."""
    return b'{"prompt": "x", "user": "' + b" " * (64 << 20) + b'"}'


@functools.cache
def bomb(members: int) -> bytes:
    if members == 1:
        return gzip.compress(huge())
    return b"".join(gzip.compress(huge()[i : i + 99_999]) for i in range(3)) * (members // 3)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "DEFLATE": raw_deflate,
    "identity": bytes,
    "": bytes,
    "identity, gzip": gzip.compress,
    " gzip ,": gzip.compress,
}
UNKNOWN = ["br", "zstd", "compress", "foo", "gzip, gzip", "br, gzip", "gzip, identity, br", "é"]


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello"), max_body_bytes=MAX_BYTES) as server:
        yield server


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS.items())
async def test_known_encodings(
    server: Running, encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    # Larger than a piece, and hardly compressible.
    noise = os.urandom(150_000).hex()
    body = encode(json.dumps({"prompt": "x", "user": noise}).encode())
    status, reply = await server.post(PATH, body, **headers)
    assert status == 200, reply

    async def in_chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7001):
            yield body[start : start + 7001]

    async with server.http.post(server.url + PATH, data=in_chunks(), headers=headers) as response:
        assert response.status == 200, await response.text()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", UNKNOWN)
@pytest.mark.parametrize(
    "path",
    sorted({route.path for route in ROUTES if route.request is not None}),
)
async def test_unknown_encodings(server: Running, path: str, encoding: str) -> None:
    path = path.replace("{", "").replace("}", "")
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with server.http.post(server.url + path, data=BODY, headers=headers) as response:
        reply = await response.json()
        assert response.status == 415, reply
        assert response.headers["Accept-Encoding"] == "gzip, deflate, identity"
        assert response.headers["X-Request-Id"]
    error = reply["error"]
    assert set(reply) - {"type", "request_id"} == {"error"}
    message = error if isinstance(error, str) else error["message"]
    for known in ("gzip", "deflate", "identity"):
        assert known in message
    assert isinstance(error, str) == (
        error_format_of(path, headers).schema.__name__ == "OllamaError"
    )
    # The connection and the server go on.
    assert (await server.post(PATH, BODY))[0] == 200


async def test_an_unknown_encoding_of_no_body_is_ignored(server: Running) -> None:
    async with server.http.get(
        f"{server.url}/v1/models", headers={"Content-Encoding": "br"}
    ) as response:
        assert response.status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("damage", ["cut", "swapped", "garbage", "trailing", "plain"])
async def test_wrongly_encoded_bodies(server: Running, encoding: str, damage: str) -> None:
    body = ENCODERS[encoding](json.dumps({"messages": MESSAGES, "user": "u" * 1000}).encode())
    body = {
        "cut": body[:-3],
        "swapped": body[:10] + body[20:10:-1] + body[20:],
        "garbage": os.urandom(100),
        "trailing": body + b"secret",
        "plain": BODY,
    }[damage]
    status, reply = await server.post(
        "/v1/chat/completions", body, **{"Content-Encoding": encoding}
    )
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "secret" not in reply["error"]["message"]
    assert (await server.post(PATH, BODY))[0] == 200


@pytest.mark.parametrize("members", [1, 60])
@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/api/chat", "/infill"])
async def test_bombs_are_too_large(server: Running, path: str, members: int) -> None:
    assert len(bomb(members)) < MAX_BYTES
    status, _ = await server.post(path, bomb(members), **{"Content-Encoding": "gzip"})
    assert status == 413


async def test_members_are_limited(server: Running) -> None:
    parts = [BODY[:5], BODY[5:], *[b" "] * 30]
    body = b"".join(map(gzip.compress, parts))
    assert (await server.post(PATH, body, **{"Content-Encoding": "gzip"}))[0] == 200
    many = gzip.compress(b"") * 40_000
    assert (await server.post(PATH, many, **{"Content-Encoding": "gzip"}))[0] == 400


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 200), ("deflate", 200), ("br", 415)])
async def test_compressed_uploads(server: Running, encoding: str, status: int) -> None:
    content = os.urandom(300_000)
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    encode = ENCODERS.get(encoding, bytes)
    headers = {"Content-Encoding": encoding, "Content-Type": "multipart/form-data; boundary=b"}
    async with server.http.post(
        f"{server.url}/v1/files", data=encode(form), headers=headers
    ) as response:
        reply = await response.json()
        assert response.status == status, reply
    if status == 200:
        kept = await server.openai.files.content(reply["id"])
        assert kept.content == content


async def test_a_bomb_is_no_upload() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n'
    body = gzip.compress(head + huge())
    headers = {"Content-Encoding": "gzip", "Content-Type": "multipart/form-data; boundary=b"}
    async with (
        running(engine_replying("Hello"), max_file_bytes=MAX_BYTES) as server,
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/files", data=body, headers=headers) as response,
    ):
        assert response.status == 413, await response.text()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 1_000_003])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "DEFLATE"])
async def test_whole_bodies(size: int, encoding: str) -> None:
    for text in (b"x" * size, os.urandom(size)):
        body = ENCODERS[encoding](text)
        assert await decoded(body, encoding.lower(), size) == text
        if size:
            with pytest.raises(aiohttp.web.HTTPRequestEntityTooLarge):
                await decoded(body, encoding.lower(), size - 1)
            with pytest.raises(RequestError):
                await decoded(body[:-1], encoding.lower(), size)
