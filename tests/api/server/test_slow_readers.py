"""Clients that do not read their stream are disconnected; a pause is allowed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from support.api.api_server import ending, running, until
from support.api.fake_engine import FakeEngine, model_info

LONG = "x" * 100_000


def long_engine(text: str = LONG, step_seconds: float = 0.01) -> FakeEngine:
    """Writes ``text``, one token a step, with a context of 10^6 tokens."""
    return FakeEngine(model_info(max_context=10**6), ending(text), step_seconds=step_seconds)


@asynccontextmanager
async def unread(url: str, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """Starts a stream with a small receive buffer, and never reads from it."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        await loop.sock_sendall(client, head.encode() + data)
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("settings", "waiting"),
    [({"slow_reader_seconds": 0.5}, 0), ({"slow_reader_tokens": 100}, 101)],
    ids=["seconds", "tokens"],
)
def test_a_client_that_does_not_read_is_disconnected(
    loop: Any, settings: dict[str, Any], waiting: int
) -> None:
    loop.run(check_disconnect(settings, waiting))


async def check_disconnect(settings: dict[str, Any], waiting: int) -> None:
    # Many tokens a write fill the kernel's buffers soon.
    fast = long_engine(step_seconds=0.0)
    fast.steps_at_once = 500
    fast.waiting = waiting
    async with running(fast, **settings) as server:
        async with unread(server.url, {"prompt": "x", "max_tokens": 100_000}):
            await until(lambda: fast.closed)
            await until(lambda: server.metric("chairlift_client_disconnects_total") == 1)
        status, _ = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert status == 200


async def test_a_client_that_pauses_stays_connected() -> None:
    fast = long_engine("x" * 20_000, step_seconds=0.0)
    fast.steps_at_once = 500
    async with running(fast, slow_reader_seconds=2.0) as server:
        async with server.http.post(
            f"{server.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 30_000, "stream": True},
        ) as response:
            await response.content.readany()
            await asyncio.sleep(1.0)
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert not fast.closed
