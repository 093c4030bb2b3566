"""The text of a reply: stop strings, log-probabilities, special tokens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import (
    CHAT,
    END,
    MESSAGES,
    Running,
    engine_replying,
    ids,
    running,
)
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.generate.answer import INLINE_SCORED_TOKENS
from chairlift.api.openai import chat
from chairlift.api.responses import formatter
from chairlift.api.schemas.replies import ChatLogprobs
from chairlift.api.text.logprobs import chat_logprobs, clamp
from chairlift.engine.messages import Submit


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_stop_strings_end_a_choice_and_free_its_row(server: Running) -> None:
    body = {**CHAT, "stop": ["o w"], "logprobs": True, "top_logprobs": 2}
    _, reply = await server.post("/v1/chat/completions", body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "Hell"
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list("Hell")
    assert len(server.engine.stopped) == 1
    assert reply["usage"]["completion_tokens"] == len("Hello w")
    chunks = await server.chunks("/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == "Hell"
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 1
    _status, reply = await server.post(
        "/v1/chat/completions", {**body, "include_stop_str_in_output": True}
    )
    assert reply["choices"][0]["message"]["content"] == "Hello w"


async def test_steps_that_arrive_together_are_streamed_token_by_token() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abcdefgh" if index else "ab"), finish="length")

    engine = FakeEngine(model_info(), script, steps_at_once=4)
    async with running(engine) as server:
        body = {**CHAT, "n": 2, "stop": "fg", "stream_options": {"include_usage": True}}
        *chunks, last = await server.chunks("/v1/chat/completions", body)
        deltas: dict[int, list[str]] = {0: [], 1: []}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            deltas[choice["index"]].append(choice["delta"].get("content", choice["finish_reason"]))
        assert deltas == {0: ["", "a", "b", "length"], 1: ["", "a", "b", "c", "d", "e", "stop"]}
        assert last["usage"]["completion_tokens"] == 2 + 7
        assert len(engine.stopped) == 1


@pytest.mark.parametrize("tokens", [900, 1100])
async def test_many_logprobs_are_formatted_beside_other_streams(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of 1,000 tokens with 20 alternatives take 20 to 100 ms."""
    threads: set[bool] = set()

    def spy(*args: Any) -> ChatLogprobs:
        threads.add(threading.current_thread() is threading.main_thread())
        return chat_logprobs(*args)

    monkeypatch.setattr(chat, "chat_logprobs", spy)
    monkeypatch.setattr(formatter, "chat_logprobs", spy)
    async with running(engine_replying("a" * (tokens // 2))) as server:
        body = {**CHAT, "n": 2, "logprobs": True}
        status, reply = await server.post("/v1/chat/completions", body)
        assert status == 200
        contents = [choice["logprobs"]["content"] for choice in reply["choices"]]
        assert [len(content) for content in contents] == [tokens // 2] * 2
    async with running(engine_replying("a" * tokens)) as server:
        body = {"input": "Hi", "include": ["message.output_text.logprobs"]}
        status, reply = await server.post("/v1/responses", body)
        assert status == 200
        assert len(reply["output"][0]["content"][0]["logprobs"]) == tokens
        assert (await server.get(f"/v1/responses/{reply['id']}")) == (200, reply)
    assert threads == {tokens <= INLINE_SCORED_TOKENS}


async def test_chat_logprobs_in_strict_mode() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("é!"), END], ended_by_token=True)

    async with running(FakeEngine(model_info(), script)) as server:
        reply = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert reply.choices[0].logprobs is not None
        content = reply.choices[0].logprobs.content
        assert content is not None
        assert [entry.token for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [33]]
        assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
        stream = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, logprobs=True, stream=True
        )
        tokens = []
        async for chunk in stream:
            logprobs = chunk.choices[0].logprobs
            tokens += [entry.token for entry in (logprobs.content or [])] if logprobs else []
        assert tokens == [entry.token for entry in content]


async def test_completion_logprobs(server: Running) -> None:
    reply = await server.openai.completions.create(model="org/tiny", prompt="x", logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hello world")
    assert logprobs.text_offset == list(range(11))
    assert logprobs.token_logprobs == [-0.5] * 11
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in logprobs.top_logprobs)


async def test_logprobs_of_minus_infinity_are_valid_json() -> None:
    assert clamp(float("-inf")) == -9999.0
    assert clamp(-1.5) == -1.5


async def test_special_tokens_are_hidden_unless_asked_for() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("a"), END, *ids("b")], finish="length")

    async with running(FakeEngine(model_info(), script)) as server:
        body = {"prompt": "x", "ignore_eos": True}
        _, reply = await server.post("/v1/completions", body)
        assert reply["choices"][0]["text"] == "ab"
        _, reply = await server.post("/v1/completions", {**body, "skip_special_tokens": False})
        assert reply["choices"][0]["text"] == "a<|im_end|>b"
