"""The prompt of ``chairlift chat``: typed keys, slash commands, completion; without a server."""

from __future__ import annotations

import base64
import io
import json
import re
import stat
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from chairlift.api.cli.chat import parameters, saved
from chairlift.api.cli.chat.client import ChatClient, ChatError, Speed, TextDelta
from chairlift.api.cli.chat.completion import SlashCompleter
from chairlift.api.cli.chat.conversation import Conversation
from chairlift.api.cli.chat.display import PlainDisplay
from chairlift.api.cli.chat.images import MAX_BYTES, image_of
from chairlift.api.cli.chat.session import Session
from chairlift.api.cli.chat.slash import COMMANDS, copy_to_clipboard, run_command

PNG = b"\x89PNG\r\n\x1a\n"
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
MODELS = ["org/first", "org/second", "adapter"]


class ScriptedClient(ChatClient):
    """Answers with the number of messages and the last one; fails if that is "fail".

    Its second model takes no images.
    """

    def __init__(self) -> None:
        super().__init__("http://localhost:1", None)
        self.bodies: list[dict[str, Any]] = []

    # ChatClient's dataclass is frozen; the list of requests is not one of its fields.
    __slots__ = ("__dict__",)
    __setattr__ = object.__setattr__

    async def models(self) -> list[dict[str, Any]]:
        modalities = (["text", "image"], ["text"], None)
        pairs = zip(MODELS, modalities, strict=True)
        return [{"id": name, "input_modalities": each} for name, each in pairs]

    async def reply(
        self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], speed: Speed
    ) -> AsyncGenerator[TextDelta]:
        self.bodies.append({**body, "messages": list(messages)})
        content = messages[-1]["content"]
        question = content if isinstance(content, str) else content[-1]["text"]
        if question == "fail":
            raise ChatError("refused \x1b[31m")
        if question == "interrupt":
            yield TextDelta("partly", False)
            raise KeyboardInterrupt
        speed.note_text()
        yield TextDelta("hm", True)
        yield TextDelta(f"{len(messages)}:{question}", False)


def talk(
    keys: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[ScriptedClient, Conversation]:
    """Types ``keys`` in a new conversation, and then leaves."""
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(folder))
    client = ScriptedClient()
    conversation = Conversation(client, {}, None, lambda: PlainDisplay(on_terminal=True))
    with create_pipe_input() as keyboard, conversation:
        keyboard.send_bytes((keys + "\x04\x04").encode(errors="surrogateescape"))
        Session(conversation, keyboard, DummyOutput()).run(client.base_url, None)
    return client, conversation


def replies(conversation: Conversation) -> list[str]:
    return [turn["content"] for turn in conversation.turns if turn["role"] == "assistant"]


def test_enter_sends_and_alt_enter_or_a_paste_begins_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = "one\x1b\rtwo\r\x1b[200~three\r\nfour\x1b[201~ five\r"
    client, _ = talk(keys, monkeypatch, tmp_path)
    questions = [body["messages"][-1]["content"] for body in client.bodies]
    assert questions == ["one\ntwo", "three\nfour five"]


def test_slash_commands_change_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (
        '/system Be brief\r/set temperature 0.5\r/set stop ["END"]\r/model org/second\ra\r'
        "/set temperature\r/system none\rb\r/clear\rc\r"
    )
    client, _ = talk(keys, monkeypatch, tmp_path)
    first, second, third = client.bodies
    assert first["messages"][0] == {"role": "system", "content": "Be brief"}
    assert (first["model"], first["temperature"]) == ("org/second", 0.5)
    assert "temperature" not in second
    assert second["stop"] == ["END"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert [message["content"] for message in third["messages"]] == ["c"]
    assert "error" not in capsys.readouterr().err


def test_retry_replaces_the_reply_and_repeats_a_question_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, conversation = talk("a\rb\r/retry\rfail\r/retry\r", monkeypatch, tmp_path)
    assert replies(conversation) == ["1:a", "3:b"]
    questions = [body["messages"][-1]["content"] for body in client.bodies]
    assert questions == ["a", "b", "b", "fail", "fail"]
    assert len(client.bodies[2]["messages"]) == 3
    errors = capsys.readouterr().err
    assert errors.count("error: refused [31m\n") == 2
    assert "\x1b" not in errors


def test_a_stopped_reply_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, conversation = talk("interrupt\rb\r", monkeypatch, tmp_path)
    assert replies(conversation) == ["partly", "3:b"]


def test_a_saved_conversation_is_a_request_body_and_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my talk.json"
    talk(f"/system S\r/set seed 7\ra\r/save {path}\r", monkeypatch, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    body = json.loads(path.read_text())
    assert (body["model"], body["seed"], len(body["messages"])) == ("org/first", 7, 3)
    client, conversation = talk(f"/load {path}\rb\r/save {path}\r", monkeypatch, tmp_path)
    assert (conversation.system, client.bodies[0]["seed"]) == ("S", 7)
    assert replies(conversation) == ["2:a", "4:b"]
    assert len(json.loads(path.read_text())["messages"]) == 5

    other = tmp_path / "other"
    other.write_text("precious")
    _, conversation = talk(f"a\r/save {other}\r/load {other}\r", monkeypatch, tmp_path)
    assert other.read_text() == "precious"
    assert replies(conversation) == ["1:a"]
    assert "is no saved conversation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/image /nonexistent/a.png", "cannot read /nonexistent/a.png: No such file"),
        ("/image /tmp", "/tmp is no file"),
        ("/image /dev/null", "/dev/null is no file"),
        ("/image a\0b", "cannot read"),
        (f"/image {__file__}", "test_chat_session.py is no image in PNG, JPEG, WebP or GIF"),
        ("/image http://127.0.0.1:9/a.png", "cannot fetch http://127.0.0.1:9/a.png"),
        ("/image http://[", "cannot fetch"),
        ("/sett x", "did you mean /set"),
        ("/set temprature 1", "is no parameter"),
        ("/set temperature hot", "temperature"),
        ("/set temperature 99", "temperature"),
        ("/set max_tokens -1", "max_tokens"),
        ("/set seed " + "[" * 5000, "seed"),
        ("/model other", "org/first, org/second"),
        ("/save", "/save needs FILE"),
        ("/load /nonexistent/file", "cannot load"),
        ("/save /nonexistent/file", "cannot save"),
        ("/clear now", "takes no argument"),
        ("/retry", "no question yet"),
        ("/copy", "no reply yet"),
    ],
)
def test_a_wrong_command_is_one_line_and_changes_nothing(line: str, words: str) -> None:
    with Conversation(ScriptedClient(), {}, None, lambda: PlainDisplay(True)) as conversation:
        with pytest.raises(ChatError) as raised:
            run_command(conversation, line)
        assert words in str(raised.value)
        assert (conversation.turns, conversation.images) == ([], [])
        assert conversation.fields in ({}, {"model": MODELS[0]})


@pytest.mark.parametrize("line", ["/etc/hosts is what?", " /help", "5/3?", "//"])
def test_other_lines_with_slashes_are_questions(line: str) -> None:
    with Conversation(ScriptedClient(), {}, None, lambda: PlainDisplay(True)) as conversation:
        assert not run_command(conversation, line)


def test_commands_and_their_arguments_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    with Conversation(ScriptedClient(), {}, None, lambda: PlainDisplay(True)) as conversation:
        conversation.model_ids()
        completer = SlashCompleter(conversation)

        def completed(text: str) -> list[str]:
            document = Document(text, len(text))
            found = completer.get_completions(document, CompleteEvent())
            return [text[: len(text) + c.start_position] + c.text for c in found]

        assert completed("/") == [f"/{name}" for name in COMMANDS]
        assert completed("/s") == ["/system", "/set", "/save"]
        assert completed("/set top") == ["/set top_k", "/set top_p"]
        assert completed("/set ") == [f"/set {name}" for name in parameters.names()]
        assert completed("/model org/") == ["/model org/first", "/model org/second"]
        for command in ("load", "save", "image"):
            assert completed(f"/{command} {tmp_path}/t") == [f"/{command} {tmp_path}/talk.json"]
        assert completed("/help ") == completed("what") == completed("/what ") == []


def test_images_are_sent_with_the_next_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a b.png").write_bytes(PNG)
    path = tmp_path / "talk.json"
    keys = (
        f"/image {tmp_path}/a b.png\r/image '{tmp_path}/a b.png'\ra\rb\r/retry\r"
        f"/image {tmp_path}/a\\ b.png\rfail\r/retry\rc\r"
        f"/image {tmp_path}/a b.png\r/image none\rd\r/save {path}\r"
        f"/model org/second\r/image {tmp_path}/a b.png\re\r"
    )
    client, conversation = talk(keys, monkeypatch, tmp_path)
    asked = [body["messages"][-1]["content"] for body in client.bodies]
    part = {"type": "image_url", "image_url": {"url": URL}}
    first, failed = (
        [*images, {"type": "text", "text": text}]
        for images, text in (([part, part], "a"), ([part], "fail"))
    )
    assert asked == [first, "b", "b", failed, failed, "c", "d", "e"]
    assert conversation.turns[0] == {"role": "user", "content": first}
    shown, errors = capsys.readouterr()
    assert "images of the next question: a b.png, a b.png\n" in shown
    assert "images of the next question: none\n" in shown
    assert "error: the model org/second takes no images" in errors
    # The file is the body of a request, and continues with its images.
    client, _ = talk(f"/load {path}\rf\r", monkeypatch, tmp_path)
    assert client.bodies[0]["messages"][0]["content"] == first
    body = json.loads(path.read_text())
    for wrong in ([], [part, 1], [{"type": "image_url", "image_url": URL}], {"a": 1}):
        body["messages"][0]["content"] = wrong
        path.write_text(json.dumps(body))
        with pytest.raises(ChatError, match="no model or messages"):
            saved.load(path)


async def test_images_are_fetched_by_the_client_without_its_key() -> None:
    asked: list[Any] = []

    async def file(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.Response(body=PNG + bytes(500))

    app = web.Application()
    app.add_routes([web.get("/a.png", file)])
    async with TestServer(app) as server:
        client = ChatClient("http://127.0.0.1:9", "sk-secret")
        url = str(server.make_url("/a.png"))
        assert image_of(await client.fetch(url, 10_000), url).url.startswith(URL[:30])
        assert len(await client.fetch(url, 100)) == 101
        with pytest.raises(ChatError, match="replies 404"):
            await client.fetch(str(server.make_url("/b.png")), 100)
    assert asked == [None, None]
    with pytest.raises(ChatError, match="a has more than 20 MiB"):
        image_of(PNG + bytes(MAX_BYTES), "a")


def test_copy_sends_the_text_to_the_terminals_clipboard_only() -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Tty()
    text = "A \x1b[31m reply\n\ud800"
    copy_to_clipboard(text, terminal)
    match = re.fullmatch(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", terminal.getvalue())
    assert match is not None
    assert base64.b64decode(match[1]).decode() == "A \x1b[31m reply\n?"
    with pytest.raises(ChatError, match="needs a terminal"):
        copy_to_clipboard(text, io.StringIO())


TYPED = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x1b"), max_size=20)
CODES = st.sampled_from(["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\r\n", "\udcff", "/set seed 1"])


@pytest.mark.slow
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(TYPED | CODES, min_size=1, max_size=5))
def test_any_pasted_text_is_sent_as_it_is_and_shown_without_control_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pieces: list[str]
) -> None:
    text = "".join(pieces).replace("\x1b[201~", "")
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        client, _ = talk(f"\x1b[200~x{text}\x1b[201~\r", patch, tmp_path)
    (body,) = client.bodies
    expected = f"x{text}".replace("\r\n", "\n").replace("\r", "\n")
    assert body["messages"][-1]["content"] == expected.encode(errors="replace").decode()
    shown = capsys.readouterr().out.replace("\x1b[2mhm\x1b[0m", "")
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown) is None


def test_a_long_history_loses_its_older_half(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    history = tmp_path / "chat-history"
    history.write_text("".join(f"\n# 2026-01-01\n+{n} {'x' * 1000}\n" for n in range(1200)))
    history.chmod(0o644)
    talk("new\r", monkeypatch, tmp_path)
    content = history.read_text()
    assert 400_000 < len(content) < 600_000
    assert content.startswith("\n# ")
    assert "+1199 x" in content
    assert content.endswith("+new\n")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_written_is_reported_and_not_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    client, _ = talk("a\r", monkeypatch, tmp_path / "file")
    assert len(client.bodies) == 1
    assert "the history is not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "tokens", "text"),
    [
        (2.0, 21, "21 tokens, first token after 0.50 s, then 10.0 tokens/s"),
        (0.001, 8, "8 tokens, first token after 0.50 s"),  # they came at once
        (0.0, 1, "1 token, first token after 0.50 s"),
        (2.0, None, "first token after 0.50 s"),
    ],
)
def test_a_speed_needs_several_tokens_and_some_time(
    seconds: float, tokens: int | None, text: str
) -> None:
    assert str(Speed(begin=1.0, first=1.5, last=1.5 + seconds, tokens=tokens)) == text
