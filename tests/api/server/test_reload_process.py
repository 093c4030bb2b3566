"""SIGHUP to a real server: it reloads its files at any time, and survives a lost terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import termios
from pathlib import Path

import aiohttp
import pytest
from support.api.credentials import ALICE, BOB, CAROL, LoopbackCertificates, bearer, write_keys
from support.api.server_process import ServerProcess, blocks, handles, linux, server_process
from support.api.server_process import until as until_patiently

pytestmark = [pytest.mark.system, linux]
HUP = signal.SIGHUP


async def test_sighup_reloads_from_start_to_exit(tiny: Path, tmp_path: Path) -> None:
    issued, path = LoopbackCertificates(tmp_path), tmp_path / "keys.toml"
    issued.write()
    write_keys(path, alice=f'"{ALICE}"')
    flags = ["--api-key-file", str(path), "--ssl-certfile", str(issued.certificate)]
    flags += ["--ssl-keyfile", str(issued.key), "--drain-timeout", "300"]
    with server_process(tmp_path, tiny, *flags, scheme="https") as server:
        port, pid = int(server.url.rpartition(":")[2]), server.process.pid
        # Before the event loop runs, the signal stays pending and is not lost.
        await until_patiently(lambda: blocks(pid, HUP) or handles(pid, HUP))
        write_keys(path, alice=f'"{ALICE}"', bob=f'"{BOB}"')
        server.signal(HUP)
        await until_patiently(lambda: "SIGHUP: read 2 API keys" in server.said)
        await server.healthy(ssl=issued.trusting)
        async with aiohttp.ClientSession(headers=bearer(BOB)) as http:
            body = {"prompt": "ab", "max_tokens": 500, "ignore_eos": True, "stream": True}
            async with http.post(
                f"{server.url}/v1/completions", json=body, ssl=issued.trusting
            ) as reply:
                assert reply.status == 200
                write_keys(path, carol=f'"{CAROL}"')
                new = issued.write()
                for _ in range(3):
                    server.signal(HUP)
                await until_patiently(lambda: "SIGHUP: read 1 API keys" in server.said)
                await until_patiently(lambda: server.said.count("read the certificate") > 1)
                assert await issued.presented(port) == new
                assert await status(server, BOB, issued) == 401
                assert await status(server, CAROL, issued) == 200
                path.write_text("broken")
                server.signal(HUP)
                await until_patiently(lambda: "not valid TOML" in server.said)
                assert await status(server, CAROL, issued) == 200
                server.signal(signal.SIGTERM)
                await server.healthy(503, ssl=issued.trusting)
                server.signal(HUP)
                text = await reply.text()
                assert text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in text
        while server.process.poll() is None:
            server.signal(HUP)
            await asyncio.sleep(0.005)
        assert await server.exit_code() == 0
        assert "Traceback" not in server.said


async def status(server: ServerProcess, key: str, issued: LoopbackCertificates) -> int:
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{server.url}/v1/models", ssl=issued.trusting) as response,
    ):
        return response.status


async def test_a_server_survives_the_loss_of_its_terminal(tiny: Path, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    with server_process(
        tmp_path,
        tiny,
        stdin=its,
        stderr=its,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as server:
        os.close(its)
        await server.healthy()
        children = server.children
        assert b"listening on" in os.read(ours, 65536)
        os.close(ours)  # sends SIGHUP, and makes every later write to stderr fail
        for _ in range(3):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{server.url}/v1/completions", json={"prompt": "ab"}) as response,
            ):
                assert response.status == 200
        assert server.children == children
        server.signal(signal.SIGTERM)
        assert await server.exit_code() == 0
