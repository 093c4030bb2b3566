"""A real server that runs out of files, disk space or log readers keeps serving its streams."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.api.server_process import (
    PATIENCE,
    ServerProcess,
    handles,
    linux,
    server_process,
    until,
)

pytestmark = [pytest.mark.system, linux]
FILES = 128


async def streamed(
    server: ServerProcess,
    tokens: int,
    prompt: str = "ab",
    on_start: Callable[[], object] = lambda: None,
) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        on_start()
        text = await reply.text()
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")


async def stopped(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    assert await server.exit_code() == 0


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


async def test_more_connections_than_files(tiny: Path, tmp_path: Path) -> None:
    """Open connections are served, even when the engine has to be restarted."""
    with (
        server_process(tmp_path, tiny, preexec_fn=limit_open_files) as server,
        ExitStack() as stack,
    ):
        await server.healthy()
        port = int(server.url.rpartition(":")[2])
        started = asyncio.Event()
        running = asyncio.create_task(streamed(server, 500, on_start=started.set))
        await started.wait()
        for _ in range(2 * FILES):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{server.url}/health") as reply,
        ):
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) > 0
            assert (await reply.json())["error"]["code"] == "too_many_connections"
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < FILES
        engine = await server.engine()
        os.kill(engine, signal.SIGKILL)
        await until(lambda: server.engines not in ([], [engine]))
        await running
        stack.close()
        await server.healthy()
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as reply:
            refused = 'chairlift_requests_rejected_total{reason="connections"}'
            (line,) = (e for e in (await reply.text()).splitlines() if e.startswith(refused))
            assert float(line.split()[1]) > FILES
        await stopped(server)


async def test_a_full_disk(tiny: Path, tmp_path: Path) -> None:
    """Log, stored prefixes, swapped states and black box cannot be written."""
    folders = [tmp_path / "prefixes", tmp_path / "swap"]
    flags = ["--prefix-cache-dir", str(folders[0]), "--swap-dir", str(folders[1])]
    flags += ["--prefix-cache-bytes", "200K", "--kv-memory", "16M"]
    with server_process(tmp_path, tiny, *flags, preexec_fn=forbid_file_writes) as server:
        await server.healthy()
        await asyncio.gather(*(streamed(server, 20, f"{n} " * 300) for n in range(8)))
        assert server.said == ""
        await stopped(server)
        assert not [path for path in folders[0].rglob("*") if path.is_file()]


def forbid_file_writes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("reader", ["stops", "leaves", "never was"])
async def test_a_log_that_nobody_reads(tiny: Path, tmp_path: Path, reader: str) -> None:
    options: dict[str, Any] = {}
    reads, writes = os.pipe()
    if reader == "never was":
        options["preexec_fn"] = close_standard_streams
    else:
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
        options = {"stderr": writes, "stdout": writes}
    with server_process(tmp_path, tiny, "--log-level", "debug", **options) as server:
        os.close(writes)
        if reader == "leaves":
            os.close(reads)
        await server.healthy()
        for _ in range(6):  # more debug lines than the pipe holds
            await asyncio.gather(*(streamed(server, 5) for _ in range(5)))
        await server.healthy()
        await stopped(server)
    if reader != "leaves":
        os.close(reads)


def close_standard_streams() -> None:
    for number in range(3):
        os.close(number)


async def test_a_signal_before_and_during_loading(tiny: Path, tmp_path: Path) -> None:
    """The server exits at once, without a traceback, with the signal's exit code."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        with server_process(tmp_path, tiny) as server:
            await until(lambda pid=server.process.pid: handles(pid, signal.SIGTERM))
            server.signal(number)
            assert await server.exit_code() in (code, 0)
            assert "Traceback" not in server.said
        with server_process(tmp_path, tiny) as server:
            await server.engine()
            server.signal(number)
            assert await server.exit_code() == 0
            assert "Traceback" not in server.said
            assert not list(server.temporary.iterdir())
