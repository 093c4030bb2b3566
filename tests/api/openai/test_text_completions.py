"""Text completions over a real socket: prompts, choices, and usage from the prefix cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, ending, engine_replying, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.messages import Submit


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_completion(server: Running) -> None:
    reply = await server.openai.completions.create(model="org/tiny", prompt="Say")
    assert reply.choices[0].text == "Hello world"
    assert server.engine.submitted[0].params.max_tokens == 16
    assert server.engine.submitted[0].prompt == ids("Say")


async def test_completion_keeps_its_leading_space() -> None:
    async with running(FakeEngine(model_info(), ending(" Paris"))) as server:
        _status, body = await server.post("/v1/completions", {"prompt": "It is", "echo": True})
        assert body["choices"][0]["text"] == "It is Paris"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "bc"], [ids("a"), ids("bc")]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([1, 2], [[1, 2]]),
    ],
)
async def test_prompt_shapes(server: Running, prompt: Any, expected: list[list[int]]) -> None:
    status, body = await server.post("/v1/completions", {"prompt": prompt})
    assert status == 200
    assert sorted(request.prompt for request in server.engine.submitted) == sorted(expected)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


async def test_n_and_several_prompts_with_echo() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids(f"-{index}"), finish="length")

    async with running(FakeEngine(model_info(), script)) as server:
        body = {"prompt": ["a", "b"], "n": 2, "echo": True}
        status, reply = await server.post("/v1/completions", body)
        assert status == 200
        texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
        assert texts == [(0, "a-0"), (1, "a-1"), (2, "b-0"), (3, "b-1")]
        assert len(server.engine.submitted) == 2
        assert reply["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 8,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        streamed = {0: "", 1: "", 2: "", 3: ""}
        finishes = []
        for chunk in await server.chunks("/v1/completions", body):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                finishes.append((choice["index"], choice["finish_reason"]))
        assert streamed == dict(texts)
        assert sorted(finishes) == [(index, "length") for index in range(4)]


async def test_completion_stream(server: Running) -> None:
    # NOTE: The strict client forbids the null finish_reason that OpenAI's own completions stream.
    client = server.openai.with_options(_extra_kwargs={"_strict_response_validation": False})
    stream = await client.completions.create(model="org/tiny", prompt="Say", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_salt_reaches_every_prompt_of_a_request(server: Running) -> None:
    salt = "é" * 256
    await server.post("/v1/chat/completions", {**CHAT, "cache_salt": salt})
    await server.post("/v1/completions", {"prompt": ["a", "b"], "cache_salt": "mine"})
    await server.post("/v1/completions", {"prompt": "c"})
    await server.post("/v1/completions", {"prompt": "d", "cache_salt": None})
    salts = [request.cache_salt for request in server.engine.submitted]
    assert salts == [salt, "mine", "mine", "", ""]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "It is"}),
        ("/v1/completions", {"prompt": ["It is", "a long", "x"]}),
    ],
)
async def test_usage_counts_tokens_from_the_prefix_cache(
    path: str, body: dict[str, Any], n: int
) -> None:
    def script(request: Submit, index: int) -> Scripted:
        # The engine reports this with every choice; usage counts it once a prompt.
        return Scripted(ids("abc"), finish="length", cached_tokens=len(request.prompt) // 2)

    async with running(FakeEngine(model_info(max_rows=16), script)) as server:
        body = {**body, "n": n}
        _, reply = await server.post(path, body)
        prompts = [len(request.prompt) for request in server.engine.submitted]
        cached = sum(length // 2 for length in prompts)
        assert cached > 0
        assert reply["usage"]["prompt_tokens"] == sum(prompts)
        assert reply["usage"]["completion_tokens"] == 3 * n * len(prompts)
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        with_usage = {**body, "stream_options": {"include_usage": True}}
        *rest, last = await server.chunks(path, with_usage)
        assert all(chunk["usage"] is None for chunk in rest)
        assert last["usage"] == reply["usage"]


async def test_a_stop_string_keeps_the_count_of_cached_tokens() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abcdef"), chunk=6, cached_tokens=2)

    async with running(FakeEngine(model_info(), script)) as server:
        _, reply = await server.post("/v1/completions", {"prompt": "xyz", "stop": "b"})
        assert reply["choices"][0]["text"] == "a"
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_the_fingerprint_changes_with_the_kv_quantization() -> None:
    seen = set()
    for bits, size in ((None, None), (8, 64), (4, 64), (4, 32)):
        info = model_info(kv_bits=bits, kv_group_size=size)
        async with running(FakeEngine(info, ending("x"))) as server:
            _, reply = await server.post("/v1/completions", {"prompt": "x"})
            seen.add(reply["system_fingerprint"])
    assert len(seen) == 4
