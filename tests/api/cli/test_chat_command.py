"""``chairlift chat`` against the real application: in a terminal, with pipes, and its errors."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from support.api.api_server import END, TOKENIZER, ending, ids, running, until
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.admission.keys import NO_LIMITS, given_keys
from chairlift.engine.messages import Submit

COMMAND = [
    sys.executable,
    "-c",
    "from chairlift.api.cli.main import main; raise SystemExit(main())",
]


@dataclass
class Done:
    code: int | None
    out: str
    err: str


async def chat(*arguments: str, piped: str = "", **environment: str) -> Done:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "chat",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | environment,
    )
    out, err = await asyncio.wait_for(process.communicate(piped.encode()), 30)
    return Done(process.returncode, out.decode(), err.decode())


class Terminal:
    """The other end of the terminal in which the command runs."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._shown = ""

    async def shows(self, text: str) -> None:
        """Waits until ``text`` is shown, and discards the output up to it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            while text not in self._shown:
                ready = asyncio.Event()
                loop.add_reader(self._file, ready.set)
                await ready.wait()
                loop.remove_reader(self._file)
                self._shown += os.read(self._file, 65536).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())


@asynccontextmanager
async def in_terminal(
    *arguments: str,
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    ours, theirs = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "chat", *arguments, stdin=theirs, stdout=theirs, stderr=theirs
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


def prompt_of(request: Submit) -> str:
    return str(TOKENIZER.decode(request.prompt))


async def test_a_conversation_continues_after_a_stopped_reply() -> None:
    replies = iter(["Hello\x1b[2J", "x" * 5000, "Bye"])
    engine = FakeEngine(
        model_info(),
        lambda request, index: Scripted([*ids(next(replies)), END], ended_by_token=True),
        step_seconds=0.002,
    )
    async with (
        running(engine) as server,
        in_terminal("--base-url", server.url) as (terminal, command),
    ):
        await terminal.shows("org/tiny")
        await terminal.shows("> ")
        terminal.type("One\n")
        # The escape character of a control sequence is removed.
        await terminal.shows("Hello[2J")
        await terminal.shows("tokens/s")
        await terminal.shows("> ")
        terminal.type("Two\n")
        await terminal.shows("xxxx")
        command.send_signal(signal.SIGINT)
        await terminal.shows("stopped")
        await terminal.shows("> ")
        await until(lambda: engine.closed == [engine.submitted[1].request_id])
        command.send_signal(signal.SIGINT)  # at the prompt it only discards the line
        await terminal.shows("> ")
        terminal.type("Three\n")
        await terminal.shows("Bye")
        await terminal.shows("> ")
        terminal.type("\x04")
        assert await asyncio.wait_for(command.wait(), 30) == 0
    last = prompt_of(engine.submitted[2])
    assert [last.find(text) > 0 for text in ("One", "Hello", "Two", "xxxx", "Three")] == [True] * 5


async def test_one_question_prints_the_reply_to_stdout_and_the_speed_to_stderr() -> None:
    engine = FakeEngine(model_info(), ending("Paris"))
    async with running(engine) as server:
        flags = ["--base-url", f"{server.url}/v1/", "--system", "Be brief", "--temperature", "0"]
        argument = await chat("Capital?", *flags, "--max-tokens", "9")
        piped = await chat("--base-url", server.url, piped="From a pipe")
    assert (argument.code, argument.out) == (0, "Paris\n")
    assert argument.err.startswith("6 tokens, first token after 0.")
    assert "Traceback" not in argument.err
    first, second = engine.submitted
    assert (first.params.temperature, first.params.max_tokens) == (0, 9)
    assert 0 < prompt_of(first).find("Be brief") < prompt_of(first).find("Capital?")
    assert (piped.code, piped.out) == (0, "Paris\n")
    assert "From a pipe" in prompt_of(second)


async def test_the_key_comes_from_the_environment_or_a_flag() -> None:
    engine = FakeEngine(model_info(), ending("Yes"))
    async with running(engine, keys=given_keys(["a-good-key"], NO_LIMITS)) as server:
        without = await chat("Hi", "--base-url", server.url)
        by_environment = await chat("Hi", "--base-url", server.url, CHAIRLIFT_API_KEY="a-good-key")
        by_flag = await chat("Hi", "--base-url", server.url, "--api-key", "a-good-key")
    assert without.code == 1
    (line,) = without.err.splitlines()
    assert line.startswith("chairlift chat: error: the server answered 401")
    assert "CHAIRLIFT_API_KEY" in line
    assert (by_environment.out, by_flag.out) == ("Yes\n", "Yes\n")


async def test_every_error_is_one_line() -> None:
    broken = FakeEngine(model_info(), lambda *_: Scripted(ids("Half"), "error", error="it broke"))
    async with running(broken) as server:
        cut, unknown, empty = await asyncio.gather(
            chat("Hi", "--base-url", server.url),
            chat("Hi", "--base-url", server.url, "--model", "other"),
            chat("--base-url", server.url, piped=" \n"),
        )
    gone = await chat("Hi", "--base-url", server.url)
    for done, words in (
        (cut, "it broke"),
        (unknown, "other"),
        (empty, "there is no question"),
        (gone, f"no server answers at {server.url}"),
    ):
        assert done.code == 1
        (line,) = done.err.splitlines()
        assert line.startswith("chairlift chat: error: ")
        assert words in line
