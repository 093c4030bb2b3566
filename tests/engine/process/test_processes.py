"""A real server and its processes: which of them outlives which, and what is left in the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from support.api.server_process import ServerProcess, ended, linux, server_process, until
from support.tiny import tiny_model_dir

pytestmark = linux
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


def left(server: ServerProcess) -> list[Path]:
    return list(server.temporary.rglob("*"))


async def ask(server: ServerProcess, **fields: object) -> dict[str, object]:
    body = {"prompt": "ab", "max_tokens": 8, **fields}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        reply: dict[str, object] = await response.json()
        return reply


async def test_no_process_outlives_the_server_and_nothing_is_left(
    tiny: Path, tmp_path: Path
) -> None:
    """Whether its processes run or are stopped; the process that tries grammars among them."""
    with server_process(tmp_path, tiny) as server:
        await server.healthy()
        assert left(server) == []
        await ask(server, guided_regex="[ab]+")
        children = server.children
        assert len(children) == 2
        for pid in children:
            os.kill(pid, STOP)
        server.signal(KILL)
        await until(lambda: all(map(ended, children)))
        assert left(server) == []


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_engine_that_starts_ends_with_its_server(
    tiny: Path, tmp_path: Path, stopped: bool
) -> None:
    with server_process(tmp_path, tiny) as server:
        engine = await server.engine()
        # It says so as its first act; before it, Python starts.
        await until(lambda: b"chairlift.engine" in Path(f"/proc/{engine}/cmdline").read_bytes())
        await until(lambda: ignores_hangups(engine))
        if stopped:
            os.kill(engine, STOP)
        server.signal(KILL)
        await until(lambda: ended(engine))


def ignores_hangups(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) & 1)
    return False


SLOW_ENGINE = """
import sys, time
if "chairlift.engine" in sys.orig_argv:
    time.sleep(5)
"""


async def test_what_a_server_killed_at_its_start_left_goes_with_the_next(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_ENGINE)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"

    def start() -> ServerProcess:
        return stack.enter_context(server_process(tmp_path, tiny, env={"PYTHONPATH": path}))

    with ExitStack() as stack:
        first = start()
        await until(lambda: left(first))
        first.signal(STOP)
        abandoned = left(first)
        for pid in (*first.children, first.process.pid):
            os.kill(pid, KILL)
        await first.exit_code()
        assert left(first) == abandoned
        # One that starts at that moment, and needs its folder.
        beside = start()
        await until(lambda: left(beside) and not {*abandoned} & {*left(beside)})
        beside.signal(STOP)
        own = left(beside)
        second = start()
        await second.healthy()
        assert left(second) == own
        beside.signal(signal.SIGCONT)
        await beside.healthy()
        assert left(second) == []


async def test_an_engine_that_is_started_again_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with server_process(tmp_path, tiny) as server:
        await server.healthy()
        for _ in range(2):
            engine = server.children[0]
            os.kill(engine, KILL)
            await until(lambda engine=engine: server.children not in ([], [engine]))
            await server.healthy()
            assert json.dumps(await ask(server))
        assert left(server) == []


async def test_the_engine_leaves_signals_to_the_server(tiny: Path, tmp_path: Path) -> None:
    """``pkill chairlift`` and a unit without KillMode=mixed send SIGTERM to all processes."""
    with server_process(tmp_path, tiny) as server:
        await server.healthy()
        await ask(server, guided_regex="[ab]+")
        children = server.children
        streams = [
            asyncio.create_task(ask(server, max_tokens=400, ignore_eos=True, seed=seed))
            for seed in range(3)
        ]
        await asyncio.sleep(0.2)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            for pid in children:
                os.kill(pid, number)
        server.signal(signal.SIGUSR1)
        server.signal(signal.SIGUSR2)
        for pid in (server.process.pid, *children):
            os.kill(pid, signal.SIGTERM)
        for reply in await asyncio.gather(*streams):
            assert reply["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
        assert await server.exit_code() == 0
        assert "restart" not in server.said
        assert left(server) == []
