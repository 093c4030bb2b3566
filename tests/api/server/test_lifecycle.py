"""How the server ends, what it ends by itself, and how it does not even begin."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from support.api.api_server import CHAT, ending, running, until
from support.api.fake_engine import FakeEngine, model_info
from support.tiny import tiny_model_dir

from chairlift.api.admission.keys import NO_LIMITS, ApiKey
from chairlift.api.cli.main import main
from chairlift.api.server import serve
from chairlift.api.server.sockets import bind_all
from chairlift.api.settings import ServerSettings
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.loadtest.servers.child import free_port

pytestmark = pytest.mark.system

CHAIRLIFT = Path(sys.executable).parent / "chairlift"
PATIENCE = 30.0
LONG = "x" * 100_000


def engine(text: str = LONG, step_seconds: float = 0.01) -> FakeEngine:
    return FakeEngine(model_info(max_context=10**6), ending(text), step_seconds=step_seconds)


# The end


async def test_draining_lets_streams_finish_and_nobody_in() -> None:
    async with running(engine("hello" * 8)) as server:
        stream = asyncio.create_task(server.chunks("/v1/chat/completions", CHAT))
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x"}))
        await until(lambda: len(server.engine.submitted) == 2)
        drained = asyncio.create_task(server.service.drain.finish(PATIENCE))
        await until(lambda: server.service.drain.draining)
        for path in ("/v1/chat/completions", "/tokenize"):
            async with server.http.post(server.url + path, json=CHAT) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) > 0
                assert (await refused.json())["error"]["code"] == "draining"
        status, health = await server.get("/health")
        assert (status, health["reason"]) == (503, "draining: 2 requests to finish")
        assert server.metric("chairlift_requests_rejected_total", reason="draining") == 2
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in await stream)
        assert text == "hello" * 8
        status, reply = await whole
        assert (status, reply["choices"][0]["text"]) == (200, "hello" * 8)
        assert await drained == 0


async def test_what_does_not_finish_while_draining_is_told_so() -> None:
    async with running(engine()) as server:
        stream = asyncio.create_task(server.events("/v1/chat/completions", CHAT))
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x"}))
        await until(lambda: len(server.engine.submitted) == 2)
        assert await server.service.drain.finish(0.1) == 2
        *_, last, done = await stream
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        status, reply = await whole
        assert (status, reply["error"]["code"]) == (503, "draining")
        assert len(server.engine.closed) == 2
        assert len(server.service.drain) == 0


# Deadlines


@pytest.mark.parametrize(
    ("server_s", "client_s"), [(0.4, None), (None, 0.4), (60.0, 0.4), (0.4, 9)]
)
async def test_what_is_over_time_is_ended(server_s: float | None, client_s: float | None) -> None:
    limit = {} if client_s is None else {"timeout": client_s}
    async with running(engine(), request_seconds=server_s) as server:
        began = time.monotonic()
        status, reply = await server.post("/v1/completions", {"prompt": "x", **limit})
        assert (status, reply["error"]["code"]) == (504, "timeout")
        assert reply["error"]["message"] == "not done within 0.4 s"
        events = await server.events("/v1/chat/completions", {**CHAT, **limit})
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["message"]) == ("timeout_error", "not done within 0.4 s")
        assert "content" in events[-3]
        assert 0.8 < time.monotonic() - began < 5
        assert len(server.engine.closed) == 2


async def test_what_is_in_time_is_not() -> None:
    async with running(engine("short"), request_seconds=5.0) as server:
        status, _ = await server.post("/v1/completions", {"prompt": "x", "timeout": 4})
        assert status == 200


# Clients that do not read


@asynccontextmanager
async def unread(url: str, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A stream that nobody reads, with little room in the kernel's buffers."""
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


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("settings", "waiting"),
    [({"slow_reader_seconds": 0.5}, 0), ({"slow_reader_tokens": 100}, 101)],
    ids=["seconds", "tokens"],
)
def test_a_client_that_does_not_read_is_cut_off(
    loop: Any, settings: dict[str, Any], waiting: int
) -> None:
    loop.run(check_that_it_is_cut_off(settings, waiting))


async def check_that_it_is_cut_off(settings: dict[str, Any], waiting: int) -> None:
    # Large steps, so that the kernel's buffers are full soon.
    fast = engine(step_seconds=0.0)
    fast.steps_at_once = 500
    fast.waiting = waiting
    async with running(fast, **settings) as server:
        async with unread(server.url, {"prompt": "x", "max_tokens": 100_000}):
            await until(lambda: fast.closed)
            await until(lambda: server.metric("chairlift_client_disconnects_total") == 1)
        status, _ = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert status == 200


async def test_a_client_that_pauses_is_not() -> None:
    fast = engine("x" * 20_000, step_seconds=0.0)
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


# A real process


@contextmanager
def server_process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``chairlift serve`` of a tiny model, loaded."""
    port = free_port()
    process = subprocess.Popen(
        [CHAIRLIFT, "serve", str(folder), "--port", str(port), "--max-rows", "4", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


async def until_health(http: aiohttp.ClientSession, url: str, status: int = 200) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with http.get(f"{url}/health") as response:
                    if response.status == status:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


async def stream(http: aiohttp.ClientSession, url: str, tokens: int) -> str:
    body = {"prompt": "ab" * 50, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        return await response.text()


async def test_sigterm_lets_streams_finish_keeps_prefixes_and_ends_with_0(
    tiny: Path, tmp_path: Path
) -> None:
    with server_process(tiny, "--prefix-cache-dir", str(tmp_path)) as (process, url):
        async with aiohttp.ClientSession() as http:
            await until_health(http, url)
            streams = [asyncio.create_task(stream(http, url, 500)) for _ in range(6)]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            for text in await asyncio.gather(*streams):
                assert '"finish_reason":"length"' in text
                assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    assert list(tmp_path.rglob("*.safetensors"))  # noqa: ASYNC240


async def test_a_second_signal_ends_at_once(tiny: Path) -> None:
    with server_process(tiny) as (process, url):
        async with aiohttp.ClientSession() as http:
            await until_health(http, url)
            endless = asyncio.create_task(stream(http, url, 3500))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGINT)
            await until_health(http, url, 503)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE) == 130
            assert time.monotonic() - began < 2
            with pytest.raises(aiohttp.ClientError):
                await endless


# No beginning


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHAIRLIFT, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )


def test_what_cannot_be_served_is_one_line_before_a_model_is_looked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\nkey = 5\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["--port", str(port)], {}, f"cannot listen on 127.0.0.1:{port}: "),
            (
                ["--port", "0", "--metrics-port", str(port)],
                {},
                f"cannot listen on 127.0.0.1:{port}",
            ),
            (["--host", "192.0.2.1", "--port", "0"], {}, "cannot listen on 192.0.2.1:0"),
            (["--api-key-file", str(tmp_path / "none")], {}, "none: No such file"),
            (["--api-key-file", str(keys)], {}, "[alice]: key must be a string"),
            ([], {"CHAIRLIFT_API_KEY": "short"}, "CHAIRLIFT_API_KEY has fewer than"),
            (["--ssl-certfile", str(tmp_path / "c.pem")], {}, "c.pem: No such file"),
        ]
        for arguments, environment, said in cases:
            done = start("no/model", "--log-level", "error", *arguments, **environment)
            assert done.returncode == 1, done.stderr
            (line,) = done.stderr.splitlines()
            assert line.startswith("chairlift: error: ")
            assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--metrics-port", "8000"], "--metrics-port must not be --port"),
        (["--cors-origin", "example.org"], "is no origin like"),
        (["--rpm", "0"], "--rpm"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
    ],
)
def test_bad_flags_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "no/model", *arguments])
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("open_to_all", "keys", "warned"),
    [(True, (), True), (False, (), False), (True, (ApiKey("a", b"", NO_LIMITS),), False)],
)
async def test_a_server_that_is_open_to_all_warns_without_a_key(
    open_to_all: bool,
    keys: tuple[ApiKey, ...],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Nothing is bound but the loopback here.
    monkeypatch.setattr(serve, "is_loopback", lambda host: not open_to_all)
    settings = ServerSettings(port=0, keys=keys)
    server = serve.Server(settings, EngineConfig(), Supervision(), bind_all(settings))
    async with AsyncExitStack() as stack:
        await server._listen(stack)
    assert any("there is no API key" in record.message for record in caplog.records) == warned
