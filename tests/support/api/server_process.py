"""``chairlift serve`` as a process, for tests of signals, exit codes and leftovers."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chairlift.api.server.sockets import bind
from chairlift.loadtest.servers import procfs
from chairlift.loadtest.servers.ports import free_port

CHAIRLIFT = Path(sys.executable).parent / "chairlift"
# Seconds that a busy machine may take for anything.
PATIENCE = 120.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


def _has_ipv6() -> bool:
    try:
        bind("::1", 0).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")


@dataclass
class ServerProcess:
    """One server process.

    Attributes:
        url: where it serves.
        temporary: its temporary folder.
        log: the file that holds its stderr.
    """

    process: subprocess.Popen[bytes]
    url: str
    temporary: Path
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def children(self) -> list[int]:
        """The process ids of the engine, of the workers, and of the engine's own children."""
        return procfs.tree(self.process.pid)[1:]

    @property
    def engines(self) -> list[int]:
        """The process ids of living engines: one, or none between two of them."""
        return [pid for pid in self.children if b"\0chairlift.engine\0" in command_line(pid)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    async def engine(self) -> int:
        """Waits for the engine process and returns its process id."""
        found: list[int] = []
        await until(lambda: found.extend(self.engines) or found)
        return found[0]

    async def healthy(self, status: int = 200, **options: Any) -> None:
        """Waits until /health answers with that status."""
        deadline = time.monotonic() + PATIENCE
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline:
                assert self.process.poll() is None, self.said
                with suppress(aiohttp.ClientConnectionError):
                    async with http.get(f"{self.url}/health", **options) as response:
                        if response.status == status:
                            return
                await asyncio.sleep(0.1)
        raise AssertionError(self.said)


def short_folder(link: Path) -> Path:
    """A folder whose path is short enough for a local socket.

    It is removed when the tests end. The same ``link`` gives the same folder.
    """
    if not link.exists():
        folder = tempfile.mkdtemp(prefix="t-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        link.symlink_to(folder)
    return link.resolve()


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition`` holds, for PATIENCE seconds at most."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


def command_line(pid: int) -> bytes:
    """A process's arguments, each with a null byte behind it; nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that has not been waited for."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def blocks(pid: int, number: int) -> bool:
    """Whether a process blocks a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    raise AssertionError("there is no such line")


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    raise AssertionError("there is no such line")


@contextmanager
def server_process(
    folder: Path,
    model: Path | str,
    *flags: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    scheme: str = "http",
    **options: Any,
) -> Iterator[ServerProcess]:
    """Starts a server with 4 rows, and kills it and its children at the end.

    Args:
        folder: holds the server's temporary folder and log.
        model: the model to serve.
        flags: further flags of ``chairlift serve``.
        options: further arguments of ``subprocess.Popen``.
    """
    temporary = short_folder(folder / "tmp")
    port = port or free_port()
    log = folder / f"{port}-{time.monotonic_ns()}.log"
    environment = {**os.environ, "TMPDIR": str(temporary), **options.pop("env", {})}
    command = [str(CHAIRLIFT), "serve", str(model), "--host", host, "--port", str(port), *flags]
    with log.open("wb") as stderr:
        options = {"stderr": stderr, "stdin": subprocess.DEVNULL, **options}
        process = subprocess.Popen(
            [*command, "--max-rows", "4"], env=environment, start_new_session=True, **options
        )
    shown = f"[{host}]" if ":" in host else host
    server = ServerProcess(process, f"{scheme}://{shown}:{port}", temporary, log)
    children = []
    try:
        yield server
    finally:
        children = server.children
        process.kill()
        process.wait()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
