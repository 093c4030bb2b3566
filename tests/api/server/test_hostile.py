"""Requests that are made to be costly: nobody else waits for them, and each gets a clear answer."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.api.api_server import CHAT, END, Running, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.tiny import tiny_model_dir

from chairlift.api.anthropic.history import messages_of
from chairlift.api.anthropic.request import MessagesRequest, Turn
from chairlift.api.chat.tool_form import as_text
from chairlift.api.schemas.bounds import (
    MAX_ENTRIES,
    MAX_PARTS,
    MAX_VALUES,
    values_in,
    values_of,
    weight,
)
from chairlift.api.schemas.messages import Message
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import parse
from chairlift.api.server.routes import ROUTES
from chairlift.api.text import vocabulary
from chairlift.engine.errors import RequestError
from chairlift.loadtest.faults.__main__ import main
from chairlift.loadtest.faults.hostile_bodies import ENDPOINTS, hostile_bodies, repeated

# The CPU time of one callback of the loop, on a machine that may be slow.
MOST_SECONDS = 0.25


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    engine = FakeEngine(model_info(), lambda request, index: Scripted([*ids("text"), END]))
    async with running(engine) as server:
        yield server


@contextmanager
def loop_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """Gives the CPU time of the longest callback so far: others' load does not count."""
    longest = 0.0
    run = asyncio.events.Handle._run

    def watched(handle: asyncio.events.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", watched)
        yield lambda: longest


def messages(content: str, size: int) -> bytes:
    return repeated(f'{{"role":"user","content":{content}}}', size)


MIB = 1 << 20
# What is sent, and the field that the answer names.
COSTLY: dict[str, tuple[str, bytes, str | None]] = {
    "parts of a wrong type": (
        "/v1/responses",
        b'{"input":' + repeated('{"type":"message","role":"user","content":[1]}', 4 * MIB) + b"}",
        "input[0].message.content[0]",
    ),
    "4 MiB of parts of a wrong type": (
        "/v1/responses",
        b'{"input":[{"role":"user","content":' + repeated('{"type":"x"}', 4 * MIB) + b"}]}",
        "input[0].message.content[0]",
    ),
    "empty lists": (
        "/v1/chat/completions",
        b'{"messages":' + repeated("[]", 8 * MIB) + b"}",
        "messages[0]",
    ),
    "too many messages": (
        "/v1/chat/completions",
        b'{"messages":' + messages('"a"', MIB) + b"}",
        "messages",
    ),
    "too many parts": (
        "/v1/messages",
        b'{"max_tokens":1,"messages":'
        + messages("[" + ",".join(['{"type":"text","text":"a"}'] * 40) + "]", MIB)
        + b"}",
        "messages",
    ),
    "token ids": ("/v1/embeddings", b'{"input":' + repeated("1", 8 * MIB) + b"}", "input"),
    "wrong token ids": ("/detokenize", b'{"tokens":' + repeated("-1", 4 * MIB) + b"}", "tokens[0]"),
    "stop token ids": (
        "/v1/completions",
        b'{"prompt":"a","stop_token_ids":' + repeated('"x"', 4 * MIB) + b"}",
        "stop_token_ids[0]",
    ),
    "metadata": (
        "/v1/responses",
        b'{"input":"a","metadata":{'
        + b",".join(b'"%d":1' % number for number in range(300_000))
        + b"}}",
        "metadata",
    ),
    "a schema of many values": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"guided_json":{"enum":'
        + repeated("1", 2 * MIB)
        + b"}}",
        "guided_json",
    ),
    "tools of many values": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":'
        b'{"name":"f","parameters":{"enum":' + repeated("[]", 2 * MIB) + b"}}}]}",
        "tools[0].function.parameters",
    ),
    "stops": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"stop":' + repeated('"a"', 4 * MIB) + b"}",
        "stop",
    ),
}


@pytest.mark.parametrize(("path", "body", "param"), COSTLY.values(), ids=COSTLY)
async def test_a_costly_body_is_refused_by_name_beside_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes, param: str | None
) -> None:
    with loop_watched(monkeypatch) as longest:
        status, reply = await server.post(path, body)
        assert longest() < MOST_SECONDS
    assert status == 400, reply
    error = reply["error"]
    if path != "/v1/messages":
        assert error["param"] == param, error
    assert str(param) in error["message"]
    assert len(error["message"]) < 1000


async def test_blank_lines_of_a_grammar_hold_up_nothing(server: Running) -> None:
    """The library's own guess of a grammar's notation takes the square of them: 340 s."""
    grammar = 'root ::= "a"\n' + "\n" * 131_000
    asked = asyncio.create_task(
        server.post("/v1/chat/completions", {**CHAT, "guided_grammar": grammar})
    )
    began = time.monotonic()
    while not asked.done():
        assert (await server.get("/health"))[0] == 200
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 60
    status, _ = await asked
    assert status == 200


@pytest.mark.parametrize("extra", [b"", b',"unknown":' + repeated("[]", MIB)])
async def test_a_large_body_is_read_alike_in_a_process(server: Running, extra: bytes) -> None:
    """What a request asks for does not depend on where it was read."""
    for path, fields in (
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"Hi"}],"seed":5,"top_k":3'),
        ("/v1/completions", b'"prompt":"Hi","seed":5,"logit_bias":{"5":1},"stop":["a","b"]'),
        ("/v1/responses", b'"input":[{"role":"user","content":"Hi"}],"top_k":3'),
        ("/v1/messages", b'"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"top_k":3'),
    ):
        status, reply = await server.post(path, b"{" + fields + extra + b"}")
        assert status == 200, reply
    plain, _, responses, anthropic = server.engine.submitted
    assert plain.params.seed == 5
    assert {s.params.top_k for s in (plain, responses, anthropic)} == {3}
    assert plain.prompt == responses.prompt == anthropic.prompt


async def test_long_texts_have_the_same_tokens_wherever_they_are_made(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "THREAD_CHARS", 10)
    words = server.service.model().vocabulary
    for text in ("short", "a longer text, é and 🙂 " * 50, "<|im_end|> is special " * 5):
        for add in (False, True):
            expected = list(words._tokenizer.encode(text, add_special_tokens=add))
            assert await words.encode(text, add) == expected
    assert server.metric("chairlift_worker_jobs_total", outcome="done") == 4


async def test_a_text_that_takes_too_long_to_tokenize_is_refused_by_name(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "THREAD_CHARS", 10)
    monkeypatch.setattr(vocabulary, "TOKENIZE_SECONDS", 0.001)
    words = server.service.model().vocabulary
    with pytest.raises(RequestError, match="input: the text takes longer") as caught:
        await words.encode("a b " * 500_000, param="input")
    assert caught.value.param == "input"


def _lists(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for inner in schema.values():
            yield from _lists(inner, seen)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from _lists(inner, seen)


@pytest.mark.parametrize(
    "kind", [route.request for route in ROUTES if route.request], ids=lambda kind: kind.__name__
)
def test_every_list_of_every_request_has_a_limit_and_ends_at_its_first_error(
    kind: type[Request],
) -> None:
    for schema in _lists(kind.__pydantic_core_schema__, set()):
        assert schema["fail_fast"]
        assert schema["max_length"] <= 1 << 20


JSON = st.recursive(
    st.sampled_from([None, True, 0, -1, 1e9, "", "a", {"type": "text"}, {"role": "user"}]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda some: some * 50)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([r.request for r in ROUTES if r.request]), st.data())
def test_whatever_is_wrong_there_are_few_errors(kind: type[Request], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.model_fields))
    body = data.draw(st.dictionaries(names, JSON, max_size=3))
    errors = 0
    try:
        parse(kind, json.dumps(body).encode())
    except ValidationError as error:
        errors = error.error_count()
    except RequestError:
        pass
    # One for each field that is wrong or missing, and for each of an object's fields.
    assert errors <= 40


@given(st.recursive(st.integers() | st.text(',[{"\\a', max_size=5), st.lists, max_leaves=20))
def test_counting_never_counts_too_few(value: Any) -> None:
    text = json.dumps(value)
    assert weight(text.encode()) >= values_of(value) - 1 - (value == [])
    assert values_in(text, 1 << 30) >= values_in(text, 0) >= values_of(value) - 1 - (value == [])
    unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert values_in(text, 0) <= sum(map(unquoted.count, ",[{"))


def test_counting_a_text_of_quotation_marks_takes_linear_time() -> None:
    for text in ('"' * 4_000_000, '\\"' * 2_000_000, '"\\' * 2_000_000, "," * 4_000_000):
        began = time.thread_time()
        values_in(text, 0)
        assert time.thread_time() - began < 3


async def test_arguments_of_too_many_values_are_refused(server: Running) -> None:
    arguments = '{"a":[' + "[]," * MAX_VALUES + "[]]}"
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    conversation = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    engine = FakeEngine(model_info(max_context=1 << 20), lambda request, index: Scripted([END]))
    async with running(engine) as roomy:
        status, reply = await roomy.post("/v1/chat/completions", {"messages": conversation})
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert f"more than {MAX_VALUES} values" in reply["error"]["message"]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_turns_of_one_role_are_joined_in_linear_time(role: Any) -> None:
    """Joined one by one, they would be copied 4096 times."""
    block = {"type": "text", "text": "x" * 4000}
    turns = [Turn.model_validate({"role": role, "content": [block, block]}) for _ in range(4096)]
    began = time.thread_time()
    (message,) = messages_of([], turns)
    assert time.thread_time() - began < 2
    assert message["content"] == "\n\n".join(["x" * 8000] * 4096)


def test_blocks_of_one_turn_are_joined_in_linear_time() -> None:
    block = {"type": "text", "text": "x" * 4000}
    for role in ("user", "assistant"):
        turn = Turn.model_validate({"role": role, "content": [block] * MAX_ENTRIES})
        began = time.thread_time()
        (message,) = messages_of([], [turn])
        assert time.thread_time() - began < 2
        assert message["content"] == "x" * 4000 * MAX_ENTRIES


def test_users_behind_a_result_are_joined_in_linear_time() -> None:
    results = [Message(role="tool", content="result")]
    users = [Message(role="user", content="x" * 4000) for _ in range(4000)]
    began = time.thread_time()
    (message,) = as_text([*results, *users], None, False)
    assert time.thread_time() - began < 2
    assert message["content"].count("\nx") == 4000


def test_parts_and_values_are_limited_together() -> None:
    parts = [{"type": "text", "text": "a"}] * 1000
    turns = [{"role": "user", "content": parts}] * (MAX_PARTS // 1000 + 1)
    with pytest.raises(RequestError, match=f"at most {MAX_PARTS} parts") as caught:
        parse(MessagesRequest, json.dumps({"messages": turns, "max_tokens": 1}).encode())
    assert caught.value.param == "messages"
    few = {"messages": turns[:-1], "max_tokens": 1}
    assert len(parse(MessagesRequest, json.dumps(few).encode()).messages) == len(turns) - 1


async def test_the_loop_s_lag_is_measured(server: Running) -> None:
    await asyncio.sleep(0.3)
    time.sleep(0.7)  # noqa: ASYNC251
    await asyncio.sleep(0.3)
    late = "chairlift_event_loop_lag_seconds"
    count = server.metric(f"{late}_count")
    within = server.metric(f"{late}_bucket", le="0.5")
    assert count is not None
    assert within is not None
    assert count - within >= 1


def test_hostile_bodies_are_the_same_for_a_seed_and_stay_within_their_size() -> None:
    fields = {path: ["model", "stop"] for path in ENDPOINTS}
    sizes = (4096, 65536)

    def some() -> list[tuple[str, bytes]]:
        bodies = hostile_bodies(fields, 7, sizes, 2048)
        return [(b.path, b.body) for _, b in zip(range(500), bodies, strict=False)]

    first = some()
    assert first == some()
    assert {path for path, _ in first} == set(ENDPOINTS)
    # Lists of stops and biases have their own size.
    assert sum(len(body) > 65536 for _, body in first) < 30


async def test_the_scenario(tmp_path: Path) -> None:
    model, out = tiny_model_dir(tmp_path, "llama"), tmp_path / "figures.json"
    arguments = (
        *("hostile", "--model", str(model), "--out", str(out), "--size", "1"),
        # This machine may be busy with anything.
        *("--requests", "40", "--pause", "10", "--answer", "60", "--memory", "20"),
    )
    assert await asyncio.to_thread(main, arguments) == 0
    figures = json.loads(out.read_text())
    assert figures["requests"] == 40
    assert set(figures["statuses"]) <= {"200", "400", "413", "429"}
