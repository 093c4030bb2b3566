"""Starts a server in the background for a conversation that finds none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from chairlift.api.admission.keys import KEY_VARIABLE
from chairlift.api.cli.chat.clean import one_line
from chairlift.api.cli.chat.client import ChatError

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# -P: a folder "chairlift" in the working directory is not imported.
_COMMAND = (
    sys.executable,
    "-P",
    "-c",
    "from chairlift.api.cli.main import main; raise SystemExit(main())",
    "serve",
)
_POLL_SECONDS = 0.25
_STOP_SECONDS = 10.0
# The end of the log in which its last line is looked for.
_LAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    """A server that outlives this process; its output goes to ``log``."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def how_to_stop(self) -> str:
        """One line with the command that stops the server."""
        return f"the server runs in the background: stop it with 'kill {self.process.pid}'"

    def last_line(self) -> str:
        """The last line of its log, or ""."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LAST_BYTES))
            # A progress bar overwrites its line after a carriage return.
            lines = file.read().replace(b"\r", b"\n").decode(errors="replace").split("\n")
        return next((line for line in map(one_line, reversed(lines)) if line), "")

    def stop(self) -> None:
        """Stops the server and waits for its end."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def can_start(base_url: str) -> bool:
    """Whether a server that is started here could answer at ``base_url``."""
    with suppress(ValueError):
        url = urlsplit(base_url)
        return url.scheme == "http" and url.hostname in _LOOPBACK and url.port != 0
    return False


def start(base_url: str, model: str | None, api_key: str | None, folder: Path) -> BackgroundServer:
    """Starts ``chairlift serve`` for ``base_url``, detached from this terminal.

    Args:
        base_url: its host and port are the server's.
        model: the model to serve; None means the default.
        api_key: the key that the server asks for, or None.
        folder: where the log is written.

    Raises:
        ChatError: the log cannot be written.
    """
    url = urlsplit(base_url)
    port = url.port or 80
    command = [*_COMMAND, "--host", url.hostname or "", "--port", str(port)]
    if model is not None:
        # After "--" a name that begins with a dash is no flag.
        command += ["--", model]
    log = folder / f"serve-{port}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise ChatError(f"cannot write {log}: {error.strerror}") from error
    with open(file, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Neither Ctrl-C in this terminal nor its end reaches the server.
            start_new_session=True,
            env=os.environ | ({} if api_key is None else {KEY_VARIABLE: api_key}),
        )
    return BackgroundServer(process, log)


def wait(server: BackgroundServer, is_healthy: Callable[[], bool], console: Console) -> None:
    """Waits until the server has loaded its model; shows seconds and the last line of its log.

    Raises:
        ChatError: the server has ended.
        KeyboardInterrupt: Ctrl-C. The server has been stopped.
    """
    begin = time.monotonic()
    try:
        with console.status("starting") as status:
            while not is_healthy():
                code = server.process.poll()
                if code is not None:
                    raise ChatError(
                        f"the server ended with code {code}: {server.last_line()} ({server.log})"
                    )
                text = f"starting, {time.monotonic() - begin:.0f} s: {server.last_line()}"
                line = Text(text, no_wrap=True, overflow="ellipsis")
                status.update(line)
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        server.stop()
        raise
