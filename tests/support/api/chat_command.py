"""Runs ``chairlift chat`` in a child process: with pipes, or in a pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import tempfile
import termios
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

COMMAND = [
    sys.executable,
    "-c",
    "from chairlift.api.cli.main import main; raise SystemExit(main())",
    "chat",
]
# prompt_toolkit switches bracketed paste on when it begins to read.
PROMPT = "\x1b[?2004h"
ROWS, COLUMNS = 30, 80


@dataclass
class Done:
    code: int | None
    out: str
    err: str


async def chat(*arguments: str, piped: str = "", **environment: str) -> Done:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | environment,
    )
    out, err = await asyncio.wait_for(process.communicate(piped.encode()), 180)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    return Done(process.returncode, out.decode(encoding), err.decode())


class Terminal:
    """The other end of the terminal in which the command runs.

    Attributes:
        output: all that was written to the terminal.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._seen = 0
        self.output = ""

    async def shows(self, text: str) -> str:
        """Waits until ``text`` is shown; returns what was shown before it since the last call."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(180):
                while (found := self.output.find(text, self._seen)) < 0:
                    ready = asyncio.Event()
                    loop.add_reader(self._file, ready.set)
                    await ready.wait()
                    loop.remove_reader(self._file)
                    self.output += os.read(self._file, 65536).decode(errors="replace")
        except TimeoutError:
            raise AssertionError(f"{text!r} not in {self.output[self._seen :][-2000:]!r}") from None
        before = self.output[self._seen : found]
        self._seen = found + len(text)
        return before

    async def prompts(self) -> str:
        """Waits until the command reads a line."""
        return await self.shows(PROMPT)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())


@asynccontextmanager
async def in_terminal(
    *arguments: str, stdout: int | None = None, **environment: str
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """Runs the command in a terminal, with its own cache folder unless ``environment`` names one.

    Args:
        arguments: the command's.
        stdout: another standard output than the terminal.
        environment: further variables.
    """
    ours, theirs = pty.openpty()

    def in_child() -> None:
        # Only a controlling terminal turns Ctrl-C into a signal, which a shell's background
        # processes ignore.
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "CHAIRLIFT_CACHE": folder,
            "TERM": "xterm-256color",
            # Without it prompt_toolkit waits for the terminal to tell its cursor's position.
            "PROMPT_TOOLKIT_NO_CPR": "1",
            **environment,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *arguments,
                stdin=theirs,
                stdout=theirs if stdout is None else stdout,
                stderr=theirs,
                env=os.environ | variables,
                start_new_session=True,
                preexec_fn=in_child,
            )
            try:
                yield Terminal(ours), process
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        finally:
            os.close(theirs)
            os.close(ours)
