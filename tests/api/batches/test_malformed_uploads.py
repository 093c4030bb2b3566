"""Multipart bodies that are damaged at random places: each gets a reply, and none a 5xx."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
from support.api.api_server import Running, engine_replying, running

BOUNDARY = "b0undary"
BODY = (
    b'--b0undary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b0undary\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n4000\r\n'
    b'--b0undary\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    b"Content-Type: application/jsonl\r\nContent-Length: 8\r\n\r\n{}\n{}\n{}\r\n--b0undary--\r\n"
)
# Inserted somewhere: what the format's parser gives a meaning.
PIECES = (
    *(b"\r\n", b"\r\n\r\n", b"--", b"--b0undary", b"--b0undary--\r\n", b":", b";", b'"', b"\x00"),
    *(b"\xff\xfe", b" ", b"\r", b"\n", b"Content-Length: -1\r\n", b"Content-Length: 9e9\r\n"),
    *(b"Content-Encoding: gzip\r\n", b"Content-Encoding: x\r\n", b"name*=utf-8''%ff%00"),
    *(b"Content-Transfer-Encoding: base64\r\n", b"Content-Transfer-Encoding: x\r\n"),
    *(b"Content-Type: multipart/mixed; boundary=x\r\n", b"a" * 9000, b"X: y\r\n" * 200),
)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


def damaged(seed: int) -> bytes:
    """The body with one to three changes: bytes left out, replaced or inserted, or a cut."""
    draw = random.Random(seed)
    body = BODY
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(body) + 1)
        end = start + draw.choice((0, 0, 1, 2, 20, len(body)))
        body = body[:start] + draw.choice((b"", draw.randbytes(2), *PIECES)) + body[end:]
    return body


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionParam")
async def test_damaged_bodies_are_refused(server: Running) -> None:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    statuses = set()
    async with aiohttp.ClientSession() as http:
        for seed in range(600):
            async with http.post(
                f"{server.url}/v1/files", data=damaged(seed), headers={"Content-Type": kind}
            ) as response:
                text = await response.text()
                assert response.status in (200, 400, 413), (damaged(seed), text)
                assert len(text) < 600
                statuses.add(response.status)
    assert {200, 400} <= statuses


@pytest.mark.parametrize(
    "boundary", ["", "boundary", "boundary=", "boundary=" + "b" * 80, "b=\xe9"]
)
async def test_a_wrong_boundary(server: Running, boundary: str) -> None:
    headers = {"Content-Type": f"multipart/form-data; {boundary}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/files", data=BODY, headers=headers) as response,
    ):
        assert response.status == 400, await response.text()
