"""Transcripts in the documentation: ``console`` blocks of commands and their output, run again.

``python tests/support/transcript.py PAGE`` writes the page's output anew. Lines that begin with
"$ " are commands; "> " are lines typed into ``chairlift chat``. ``chairlift serve`` runs until the
page ends; its output is shown from its start until it is healthy.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.api.chat_command import PROMPT, in_terminal

from chairlift.loadtest.servers.ports import free_port

PORT = 8000
# The command of this environment comes first.
_FOLDERS = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
_ENVIRONMENT = os.environ | {"PATH": os.pathsep.join(_FOLDERS)}
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]|\x1b\[\?2004l")
_READY_SECONDS = 300.0


class Transcript:
    """Runs a page's commands, on another port than the page says.

    Args:
        model: what ``chairlift serve`` serves where the page names no model; None: the default.

    Attributes:
        outputs: each command or typed line, and what it printed.
    """

    def __init__(self, model: Path | None = None) -> None:
        self.outputs: list[tuple[str, str]] = []
        self._model = {} if model is None else {"CHAIRLIFT_MODEL": str(model)}
        self._port = free_port()
        self._server: Process | None = None

    async def run(self, page: str) -> str:
        """Returns ``page`` with new output.

        Raises:
            AssertionError: a command failed.
        """
        parts = []
        end = 0
        try:
            for block in _BLOCK.finditer(page):
                parts += [page[end : block.start(1)], await self._block(block[1])]
                end = block.end(1)
        finally:
            if self._server is not None:
                self._server.send_signal(signal.SIGTERM)
                await self._server.wait()
                await self._reading
        return "".join([*parts, page[end:]])

    async def _block(self, text: str) -> str:
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE)
        if commands == ["chairlift chat"]:
            lines = re.findall(r"^> (.*)$", text, re.MULTILINE)
            return f"$ chairlift chat\n{await self._chat(lines)}"
        shown = ""
        for command in commands:
            serves = command.startswith("chairlift serve")
            output = await (self._serve(command) if serves else self._command(command))
            output = output.replace(str(self._port), str(PORT))
            self.outputs.append((command, output))
            shown += f"$ {command}\n{output}"
        return shown

    async def _command(self, command: str) -> str:
        here = command.replace("chairlift chat", f"chairlift chat --base-url {self._url}")
        here = here.replace(f"http://127.0.0.1:{PORT}", self._url)
        process = await asyncio.create_subprocess_shell(
            here, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=_ENVIRONMENT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, (command, output)
        return output.decode().rstrip("\n") + "\n"

    async def _serve(self, command: str) -> str:
        self._server = await asyncio.create_subprocess_shell(
            f"exec {command}",
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=_ENVIRONMENT | {"CHAIRLIFT_PORT": str(self._port)} | self._model,
        )
        stream = self._server.stdout
        assert stream is not None
        output = bytearray()

        async def read() -> None:
            while data := await stream.read(65536):
                output.extend(data)

        self._reading = asyncio.create_task(read())
        async with asyncio.timeout(_READY_SECONDS):
            while not await asyncio.to_thread(_is_healthy, self._url):
                assert self._server.returncode is None, output
                await asyncio.sleep(0.2)
        await asyncio.sleep(1)  # for the lines that follow
        return output.decode()

    async def _chat(self, lines: list[str]) -> str:
        """What a terminal shows; ``--plain``, because redrawn output is no transcript."""
        shown = ""
        async with in_terminal("--base-url", self._url, "--plain") as (terminal, process):
            shown += _plain(await terminal.prompts())
            for line in lines:
                terminal.type(f"{line}\r")
                if line == "/exit":
                    assert await asyncio.wait_for(process.wait(), 180) == 0
                    output = ""
                else:
                    await terminal.shows("\x1b[?2004l")
                    output = _plain(await terminal.shows(PROMPT))
                self.outputs.append((line, output))
                shown += f"> {line}\n{output}"
        return shown

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


def _is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health") as response:
        return bool(response.status == 200)
    return False


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(asyncio.run(Transcript().run(path.read_text())))
