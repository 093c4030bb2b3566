"""``chairlift chat`` against the real application: in a terminal, with pipes, and its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.api.api_server import END, TOKENIZER, ending, ids, running, until
from support.api.chat_command import chat, in_terminal
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.tiny import tiny_model_dir

from chairlift.api.admission.keys import NO_LIMITS, given_keys
from chairlift.engine.messages import Submit
from chairlift.loadtest.servers.ports import free_port


def prompt_of(request: Submit) -> str:
    return str(TOKENIZER.decode(request.prompt))


async def test_characters_that_the_locale_cannot_write_are_replaced() -> None:
    async with running(FakeEngine(model_info(), ending("Zürich \N{SNOWFLAKE}"))) as server:
        done = await chat("Where?", "--base-url", server.url, PYTHONIOENCODING="latin-1")
    assert (done.code, done.out) == (0, "Zürich ?\n"), done.err


@pytest.mark.slow
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
        await terminal.prompts()
        terminal.type("One\n")
        # The escape character of a control sequence is removed.
        await terminal.shows("Hello[2J")
        await terminal.shows("first token after")
        await terminal.prompts()
        terminal.type("Two\n")
        await terminal.shows("xxxx")
        command.send_signal(signal.SIGINT)
        await terminal.shows("stopped")
        await terminal.prompts()
        await until(lambda: engine.closed == [engine.submitted[1].request_id])
        terminal.type("half a line\x03")  # at the prompt it only discards the line
        await terminal.shows("Ctrl-C again leaves")
        await terminal.prompts()
        terminal.type("Three\n")
        await terminal.shows("Bye")
        await terminal.prompts()
        terminal.type("\x04")
        assert await asyncio.wait_for(command.wait(), 180) == 0
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_every_error_is_one_line() -> None:
    broken = FakeEngine(model_info(), lambda *_: Scripted(ids("Half"), "error", error="it broke"))
    async with running(broken) as server:
        cut, unknown, empty, blind = await asyncio.gather(
            chat("Hi", "--base-url", server.url),
            chat("Hi", "--base-url", server.url, "--model", "other"),
            chat("--base-url", server.url, piped=" \n"),
            chat("Hi", "--base-url", server.url, "--image", "/nowhere.png"),
        )
    gone = await chat("Hi", "--base-url", server.url)
    for done, words in (
        (cut, "it broke"),
        (unknown, "other"),
        (empty, "there is no question"),
        (blind, "the model org/tiny takes no images"),
        (gone, f"no server answers at {server.url}"),
    ):
        assert done.code == 1
        (line,) = done.err.splitlines()
        assert line.startswith("chairlift chat: error: ")
        assert words in line


@pytest.mark.slow
async def test_a_second_ctrl_c_leaves_after_a_stopped_reply_and_after_a_discarded_line() -> None:
    engine = FakeEngine(model_info(), lambda *_: Scripted(ids("x" * 5000)), step_seconds=0.002)
    async with running(engine) as server:
        async with in_terminal("--base-url", server.url) as (terminal, command):
            await terminal.prompts()
            terminal.type("One\n")
            await terminal.shows("xxxx")
            terminal.type("\x03")
            await terminal.shows("stopped")
            await terminal.prompts()
            terminal.type("\x03")
            assert await asyncio.wait_for(command.wait(), 180) == 0
        async with in_terminal("--base-url", server.url) as (terminal, command):
            await terminal.prompts()
            terminal.type("a line\x03")
            await terminal.shows("Ctrl-C again leaves")
            await terminal.prompts()
            command.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(command.wait(), 180) == 0


@pytest.mark.slow
async def test_a_pasted_text_of_several_lines_is_one_question_and_stays_in_a_private_history(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(model_info(), ending("Yes"))
    async with running(engine) as server:
        flags = ("--base-url", server.url)
        async with in_terminal(*flags, CHAIRLIFT_CACHE=str(tmp_path)) as (terminal, command):
            await terminal.prompts()
            terminal.type("\x1b[200~One\nTwo\x1b[31m\x1b[201~\n")
            await terminal.shows("Yes")
            # What was pasted is shown, but its control sequence does not run.
            assert "\x1b[31m" not in terminal.output
            await terminal.prompts()
            terminal.type("\x04")
            assert await asyncio.wait_for(command.wait(), 180) == 0
        async with in_terminal(*flags, CHAIRLIFT_CACHE=str(tmp_path)) as (terminal, command):
            await terminal.prompts()
            await asyncio.sleep(1)  # prompt_toolkit reads the file in a thread
            terminal.type("\x1b[A\n")
            await terminal.shows("Yes")
    first, second = engine.submitted
    assert "One\nTwo" in prompt_of(first)
    assert prompt_of(first) == prompt_of(second)
    history = tmp_path / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.slow
async def test_keys_typed_while_a_reply_streams_are_not_shown_in_it_but_read_afterwards() -> None:
    replies = iter(["x" * 300, "Second"])
    engine = FakeEngine(
        model_info(),
        lambda *_: Scripted([*ids(next(replies)), END], ended_by_token=True),
        step_seconds=0.004,
    )
    async with (
        running(engine) as server,
        in_terminal("--base-url", server.url) as (terminal, _),
    ):
        await terminal.prompts()
        terminal.type("One\n")
        await terminal.shows("xxxx")
        terminal.type("typed early\n")
        assert "typed" not in await terminal.prompts()
        await terminal.shows("Second")
    assert "typed early" in prompt_of(engine.submitted[1])


@pytest.mark.slow
async def test_ctrl_d_while_a_reply_streams_leaves_after_it() -> None:
    engine = FakeEngine(
        model_info(),
        lambda *_: Scripted([*ids("x" * 300), END], ended_by_token=True),
        step_seconds=0.005,
    )
    async with (
        running(engine) as server,
        in_terminal("--base-url", server.url) as (terminal, command),
    ):
        await terminal.prompts()
        terminal.type("One\n")
        await terminal.shows("xxxx")
        terminal.type("\x04")
        await terminal.shows("first token after")
        await terminal.prompts()
        assert await asyncio.wait_for(command.wait(), 30) == 0


@pytest.mark.slow
async def test_markdown_is_rendered_in_a_terminal_only() -> None:
    reply = "# Title\n\nSome **bold** text\n\n- one\n- two\n"
    engine = FakeEngine(model_info(), ending(reply))
    async with running(engine) as server:
        flags = ["--base-url", server.url]
        async with in_terminal("Hi", *flags) as (terminal, command):
            await terminal.shows("tokens, first")
            assert await asyncio.wait_for(command.wait(), 180) == 0
        async with in_terminal("Hi", "--plain", *flags) as (plain, command):
            await plain.shows("tokens, first")
        async with in_terminal("Hi", *flags, TERM="dumb") as (dumb, command):
            await dumb.shows("tokens, first")
        piped = await chat("Hi", *flags)
    assert "\x1b[1mbold\x1b[0m" in terminal.output
    assert "**" not in terminal.output.rpartition("\x1b[2K")[2]
    for shown in (plain, dumb):
        assert reply in shown.output.replace("\r\n", "\n")
        assert "\x1b" not in shown.output
    assert piped.out == reply + "\n"


async def test_with_replies_into_a_file_the_prompt_is_on_standard_error(tmp_path: Path) -> None:
    engine = FakeEngine(model_info(), ending("A **b**"))
    with (tmp_path / "replies").open("w+b") as file:
        async with (
            running(engine) as server,
            in_terminal("--base-url", server.url, stdout=file.fileno()) as (terminal, command),
        ):
            await terminal.prompts()
            terminal.type("Hi\n")
            await terminal.shows("tokens, first")
            await terminal.prompts()
            terminal.type("\x04")
            assert await asyncio.wait_for(command.wait(), 180) == 0
        file.seek(0)
        assert file.read() == b"A **b**\n"


@pytest.mark.slow
async def test_without_a_server_it_offers_to_start_one() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with in_terminal("--base-url", url) as (terminal, command):
        await terminal.shows("Start one in the background? (y/n)")
        terminal.type("n\n")
        await terminal.shows(f"chairlift chat: error: no server answers at {url}")
        assert await asyncio.wait_for(command.wait(), 180) == 1
    # No server can be started for another machine's address.
    async with in_terminal("--base-url", "http://localhost.invalid:1") as (terminal, command):
        await terminal.shows("chairlift chat: error: no server answers")
        assert "Start one" not in terminal.output


@pytest.mark.system
async def test_a_server_in_the_background_outlives_the_conversation(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    port = free_port()
    cache = tmp_path / "cache"
    flags = ("--base-url", f"http://127.0.0.1:{port}", "--model", str(model))
    async with in_terminal(*flags, CHAIRLIFT_CACHE=str(cache)) as (terminal, command):
        await terminal.shows("(y/n)")
        terminal.type("y\n")
        await terminal.shows("starting")
        await terminal.shows("stop it with 'kill ")
        pid = int(await terminal.shows("'"))
        try:
            await terminal.prompts()
            # A sampled reply of this model may have any length, even none.
            terminal.type("/set temperature 0\n")
            await terminal.prompts()
            terminal.type("/set max_tokens 3\n")
            await terminal.prompts()
            terminal.type("Hi\n")
            await terminal.shows(" tokens, first token after")
            await terminal.prompts()
            terminal.type("\x04")
            await terminal.shows(f"kill {pid}")
            assert await asyncio.wait_for(command.wait(), 180) == 0
            again = await chat("Hi", *flags[:2], "--max-tokens", "3")
            assert again.code == 0, again.err
        finally:
            os.kill(pid, signal.SIGTERM)
    log = cache / f"serve-{port}.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert log.read_text()


@pytest.mark.system
async def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    flags = ("--base-url", f"http://127.0.0.1:{free_port()}", "--model", str(tmp_path / "no.gguf"))
    async with in_terminal(*flags) as (terminal, command):
        await terminal.shows("(y/n)")
        terminal.type("y\n")
        await terminal.shows("chairlift chat: error: the server ended with code 1: ")
        assert "no.gguf" in await terminal.shows(".log)")
        assert await asyncio.wait_for(command.wait(), 180) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"]])
def test_help_imports_neither_the_prompt_nor_the_renderer(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from chairlift.api.cli.main import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass\n"
        "slow = {'prompt_toolkit', 'rich', 'markdown_it', 'aiohttp', 'pydantic'}\n"
        "print(slow & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: chairlift" in done.stdout
    assert done.stderr.strip() == "set()"
