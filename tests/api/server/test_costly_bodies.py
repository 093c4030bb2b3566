"""Costly requests: the event loop stays responsive, and each gets a clear answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest
from support.api.api_server import CHAT, END, TOKENIZER, Running, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.observe.lag import IDLE_SECONDS
from chairlift.api.schemas.bounds import (
    MAX_VALUES,
)
from chairlift.api.text import vocabulary
from chairlift.engine.errors import RequestError
from chairlift.loadtest.faults.hostile_bodies import repeated

# CPU time that one callback of the event loop may take on a slow machine.
MAX_CALLBACK_SECONDS = 0.25


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    engine = FakeEngine(model_info(), lambda request, index: Scripted([*ids("text"), END]))
    async with running(engine) as server:
        yield server


@contextmanager
def watch_event_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """Gives a function that returns the CPU time of the longest callback so far.

    The machine's other load does not change CPU time.
    """
    longest = 0.0
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", timed)
        yield lambda: longest


def messages(content: str, size: int) -> bytes:
    return repeated(f'{{"role":"user","content":{content}}}', size)


MIB = 1 << 20

# For each case: path, body, and the field that the answer names.
COSTLY: dict[str, tuple[str, bytes, str | None]] = {
    "parts of a wrong type": (
        "/v1/responses",
        b'{"input":' + repeated('{"type":"message","role":"user","content":[1]}', 4 * MIB) + b"}",
        "input[0].content[0]",
    ),
    "4 MiB of parts of a wrong type": (
        "/v1/responses",
        b'{"input":[{"role":"user","content":' + repeated('{"type":"x"}', 4 * MIB) + b"}]}",
        "input[0].content[0]",
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
    "tools of many properties": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"tool_choice":"required","tools":['
        b'{"type":"function","function":{"name":"f","parameters":{"properties":{'
        + b",".join(b'"%d":{"type":"string"}' % number for number in range(30_000))
        + b"}}}}]}",
        "messages",
    ),
    "stops": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"stop":' + repeated('"a"', 4 * MIB) + b"}",
        "stop",
    ),
    "Ollama's messages": (
        "/api/chat",
        b'{"messages":' + messages('"a"', MIB) + b"}",
        "messages",
    ),
    "Ollama's calls of many values": (
        "/api/chat",
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":'
        + repeated("1", 2 * MIB)
        + b"}}}]}]}",
        "messages[0].tool_calls[0].function.arguments",
    ),
    "Ollama's options": (
        "/api/generate",
        b'{"prompt":"a","options":{"stop":' + repeated('"a"', 4 * MIB) + b"}}",
        "options.stop",
    ),
    "Ollama's format": (
        "/api/generate",
        b'{"prompt":"a","format":{"enum":' + repeated("1", 2 * MIB) + b"}}",
        "format",
    ),
    "Ollama's texts": ("/api/embed", b'{"input":' + repeated('"a"', 4 * MIB) + b"}", "input"),
    "files around a gap": (
        "/infill",
        b'{"input_extra":' + repeated('{"text":"a"}', 4 * MIB) + b"}",
        "input_extra",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body", "param"), COSTLY.values(), ids=COSTLY)
async def test_a_costly_body_is_refused_by_name_without_blocking_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes, param: str | None
) -> None:
    with watch_event_loop(monkeypatch) as longest:
        status, reply = await server.post(path, body)
        assert longest() < MAX_CALLBACK_SECONDS
    assert status == 400, reply
    error = reply["error"]
    if not path.startswith("/api/"):
        if path != "/v1/messages":
            assert error["param"] == param, error
        error = error["message"]
    assert str(param) in error
    assert len(error) < 1000


async def test_blank_lines_of_a_grammar_do_not_block_the_loop(server: Running) -> None:
    """The library's guess of a grammar's notation is quadratic in them: 340 s for these."""
    grammar = 'root ::= "a"\n' + "\n" * 131_000
    request = asyncio.create_task(
        server.post("/v1/chat/completions", {**CHAT, "guided_grammar": grammar})
    )
    began = time.monotonic()
    while not request.done():
        assert (await server.get("/health"))[0] == 200
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 60
    status, _ = await request
    assert status == 200


@pytest.mark.parametrize("extra", [b"", b',"unknown":' + repeated("[]", MIB)])
async def test_a_large_body_is_read_alike_in_a_worker_process(
    server: Running, extra: bytes
) -> None:
    """A request means the same wherever it was parsed."""
    for path, fields in (
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"Hi"}],"seed":5,"top_k":3'),
        ("/v1/completions", b'"prompt":"Hi","seed":5,"logit_bias":{"5":1},"stop":["a","b"]'),
        ("/v1/responses", b'"input":[{"role":"user","content":"Hi"}],"top_k":3'),
        ("/v1/messages", b'"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"top_k":3'),
        (
            "/api/chat",
            b'"messages":[{"role":"user","content":"Hi"}],"stream":false,"options":{"top_k":3}',
        ),
    ):
        status, reply = await server.post(path, b"{" + fields + extra + b"}")
        assert status == 200, reply
    plain, _, responses, anthropic, ollama = server.engine.submitted
    assert plain.params.seed == 5
    assert {s.params.top_k for s in (plain, responses, anthropic, ollama)} == {3}
    assert plain.prompt == responses.prompt == anthropic.prompt == ollama.prompt


async def test_long_texts_have_the_same_tokens_in_a_worker(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "THREAD_CHARS", 10)
    words = server.service.model().vocabulary
    for text in ("short", "a longer text, é and 🙂 " * 50, "<|im_end|> is special " * 5):
        for add in (False, True):
            expected = list(TOKENIZER.encode(text, add_special_tokens=add))
            assert await words.encode(text, add) == expected
    assert server.metric("chairlift_worker_jobs_total", outcome="done") == 4


@pytest.mark.slow
async def test_a_text_that_takes_too_long_to_tokenize_is_refused_by_name(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "THREAD_CHARS", 10)
    monkeypatch.setattr(vocabulary, "TOKENIZE_SECONDS", 0.001)
    words = server.service.model().vocabulary
    with pytest.raises(RequestError, match="input: the text takes longer") as caught:
        await words.encode("a b " * 500_000, param="input")
    assert caught.value.param == "input"


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


async def test_the_loop_s_lag_is_measured(server: Running) -> None:
    await asyncio.sleep(0.3)
    time.sleep(IDLE_SECONDS + 0.7)  # noqa: ASYNC251
    await asyncio.sleep(0.3)
    late = "chairlift_event_loop_lag_seconds"
    count = server.metric(f"{late}_count")
    within = server.metric(f"{late}_bucket", le="0.5")
    assert count is not None
    assert within is not None
    assert count - within >= 1
