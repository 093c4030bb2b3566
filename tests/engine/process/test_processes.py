"""A real server and its processes: they end with the server, and leave no files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from support.api.server_process import ServerProcess, ended, linux, server_process, until
from support.tiny import tiny_model_dir

from chairlift.engine.process.folder import SOCKET

pytestmark = [pytest.mark.system, linux]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for several tests, of which the last ends it."""
    with server_process(tmp_path_factory.mktemp("server"), tiny) as server:
        yield server


def leftovers(server: ServerProcess) -> list[Path]:
    """The files in the server's temporary folder."""
    return list(server.temporary.rglob("*"))


def has_socket(server: ServerProcess) -> bool:
    """Whether the server has made its engine's folder. Python's tempfile makes files before."""
    return any(path.name == SOCKET for path in leftovers(server))


async def complete(server: ServerProcess, **fields: object) -> dict[str, object]:
    body = {"prompt": "ab", "max_tokens": 8, **fields}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        reply: dict[str, object] = await response.json()
        return reply


async def begin(
    server: ServerProcess, http: aiohttp.ClientSession, seed: int
) -> aiohttp.ClientResponse:
    body = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "stream": True, "seed": seed}
    response = await http.post(f"{server.url}/v1/completions", json=body)
    assert response.status == 200, await response.text()
    return response


async def test_no_process_outlives_the_server(tiny: Path, tmp_path: Path) -> None:
    """Engine and grammar worker end with the server, even if they are stopped."""
    with server_process(tmp_path, tiny) as server:
        await server.healthy()
        assert leftovers(server) == []
        await complete(server, guided_regex="[ab]+")
        children = server.children
        assert len(children) == 2
        for pid in children:
            os.kill(pid, STOP)
        server.signal(KILL)
        await until(lambda: all(map(ended, children)))
        assert leftovers(server) == []


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_starting_engine_ends_with_its_server(
    tiny: Path, tmp_path: Path, stopped: bool
) -> None:
    with server_process(tmp_path, tiny) as server:
        engine = await server.engine()
        # The engine ties itself to its parent first, but Python has to start before.
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


# An engine starts once the file that the variable names exists.
GATED_ENGINE = """
import os, sys, time
while "chairlift.engine" in sys.orig_argv and not os.path.exists(os.environ["GATE"]):
    time.sleep(0.05)
"""


async def test_leftovers_of_a_server_killed_at_its_start_are_removed_by_the_next(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(GATED_ENGINE)
    path, gate = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", tmp_path / "gate"

    def start(gate: Path) -> ServerProcess:
        environment = {"PYTHONPATH": path, "GATE": str(gate)}
        return stack.enter_context(server_process(tmp_path, tiny, env=environment))

    with ExitStack() as stack:
        first = start(gate)
        await until(lambda: has_socket(first))
        first.signal(STOP)
        abandoned = leftovers(first)
        for pid in (*first.children, first.process.pid):
            os.kill(pid, KILL)
        await first.exit_code()
        assert leftovers(first) == abandoned
        # Another server that is just starting keeps its folder.
        beside = start(gate)
        await until(lambda: has_socket(beside) and not {*abandoned} & {*leftovers(beside)})
        beside.signal(STOP)
        files = leftovers(beside)
        second = start(tmp_path)
        await second.healthy()
        assert leftovers(second) == files
        gate.touch()
        beside.signal(signal.SIGCONT)
        await beside.healthy()
        assert leftovers(second) == []


async def test_a_crash_is_in_the_log_and_the_next_engine_leaves_no_files(
    shared: ServerProcess,
) -> None:
    await shared.healthy()
    engine = await shared.engine()
    os.kill(engine, signal.SIGSEGV)
    await until(lambda: "the engine process ended with signal 11; starting" in shared.said)
    await shared.healthy()
    assert engine not in shared.children
    assert "Fatal Python error: Segmentation fault" in shared.said
    assert "engine_process.py" in shared.said, "the stack of Python calls"
    assert json.dumps(await complete(shared))
    assert leftovers(shared) == []
    left = f"__KMP_REGISTERED_LIB_{engine}"  # by Intel's OpenMP
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(left)]


async def test_only_the_server_reacts_to_signals(shared: ServerProcess) -> None:
    """``pkill chairlift`` and a unit without KillMode=mixed send SIGTERM to all processes."""
    await shared.healthy()
    await complete(shared, guided_regex="[ab]+")
    before, children = len(shared.said), shared.children
    async with aiohttp.ClientSession() as http:
        # A stream's status comes when the server has accepted the request; later ones get a 503.
        streams = await asyncio.gather(*(begin(shared, http, seed) for seed in range(3)))
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            for pid in children:
                os.kill(pid, number)
        shared.signal(signal.SIGUSR1)
        shared.signal(signal.SIGUSR2)
        for pid in (shared.process.pid, *children):
            os.kill(pid, signal.SIGTERM)
        for text in await asyncio.gather(*(stream.text() for stream in streams)):
            assert '"finish_reason":"length"' in text
    assert await shared.exit_code() == 0
    assert "restart" not in shared.said[before:]
    assert leftovers(shared) == []
