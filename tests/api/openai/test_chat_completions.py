"""Chat completions over a real socket: the official client in strict mode, a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from support.api.api_server import (
    CHAT,
    END,
    MESSAGES,
    TOKENIZER,
    Running,
    ending,
    engine_replying,
    ids,
    running,
)
from support.api.fake_engine import FakeEngine, byte_tokenizer, model_info


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_chat(server: Running) -> None:
    reply = await server.openai.chat.completions.create(model="org/tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "Hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.system_fingerprint
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(server.engine.submitted[0].prompt) == rendered
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(ids(rendered))
    assert reply.usage.completion_tokens == len("Hello world") + 1
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    params = server.engine.submitted[0].params
    assert params.max_tokens == 2048 - len(ids(rendered))
    assert params.stop_token_ids == (END,)


async def test_chat_stream(server: Running) -> None:
    stream = await server.openai.chat.completions.create(
        model="org/tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *rest, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in rest)
    assert rest[0].choices[0].delta.role == "assistant"
    assert rest[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in rest[-2:]] == [None, "stop"]
    assert rest[-1].choices[0].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_on_the_wire(server: Running) -> None:
    chunks = await server.chunks("/v1/chat/completions", CHAT)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
    with_usage = await server.chunks(
        "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    assert all(chunk["usage"] is None for chunk in with_usage[:-1])
    assert with_usage[-1]["usage"]["total_tokens"] > 0


async def test_message_contents_and_roles(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "refusal": None},
        {"role": "user", "content": "go"},
    ]
    status, _ = await server.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    text = TOKENIZER.decode(server.engine.submitted[0].prompt)
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")


async def test_a_template_that_refuses_is_a_400(server: Running) -> None:
    messages = [*MESSAGES, {"role": "user", "content": "42", "name": "nobody"}]
    status, body = await server.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "nobody speaks" in body["error"]["message"]
    assert body["error"]["param"] == "messages"


async def test_a_model_without_a_template_is_a_400() -> None:
    async with running(FakeEngine(model_info(), ending("x")), byte_tokenizer(None)) as server:
        status, body = await server.post("/v1/chat/completions", CHAT)
        assert status == 400
        assert "chat template" in body["error"]["message"]
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert status == 200


async def test_sampling_parameters_reach_the_engine(server: Running) -> None:
    parameters = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "seed": 7,
        "min_tokens": 2,
        "max_completion_tokens": 9,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    without_effect = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    harmless = {"user": "me", "store": False, "service_tier": "auto", "metadata": {"a": "b"}}
    body = {**CHAT, **parameters, **without_effect, **harmless, "top_logprobs": None, "audio": None}
    status, _ = await server.post("/v1/chat/completions", body)
    assert status == 200
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, -1)
    assert (params.frequency_penalty, params.logit_bias) == (2, {5: -100.0, 6: 1.5})
    assert (params.seed, params.min_tokens, params.max_tokens) == (7, 2, 9)
    assert (params.stop_token_ids, params.logprobs) == ((3,), None)


async def test_without_a_seed_requests_get_different_seeds(server: Running) -> None:
    for _ in range(2):
        await server.post("/v1/chat/completions", {**CHAT, "top_k": -1})
    first, second = server.engine.submitted
    assert first.params.seed != second.params.seed
    assert first.params.top_k == 0


async def test_a_servers_seed_repeats_the_seeds_of_requests_without_one() -> None:
    async def seeds(seed: int | None) -> list[int]:
        async with running(FakeEngine(model_info(), ending("abc")), seed=seed) as server:
            for own in ({}, {"seed": 7}, {}):
                await server.post("/v1/chat/completions", {**CHAT, **own})
            return [request.params.seed for request in server.engine.submitted]

    first, given, second = await seeds(3)
    assert (given, first) == (7, (await seeds(3))[0])
    assert second == (await seeds(3))[2] != first
    assert first not in (await seeds(4)) + (await seeds(None))


async def test_one_write_for_all_choices_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    original: Callable[..., Awaitable[None]] = aiohttp.web.StreamResponse.write

    async def write(self: aiohttp.web.StreamResponse, data: bytes) -> None:
        writes.append(data)
        await original(self, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", write)
    engine = FakeEngine(model_info(), ending("abc"), step_seconds=0.01)
    async with running(engine) as server:
        await server.chunks("/v1/completions", {"prompt": "x", "n": 4})
    # Three letters, the end, [DONE].
    assert len(writes) == 5
    assert writes[0].count(b"data: ") == 4
