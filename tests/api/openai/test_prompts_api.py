"""Results computed from the prompt alone: embeddings, and the log-probabilities of an echo."""

from __future__ import annotations

import asyncio
import base64
import gc
import time
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from support.api.api_server import END, ending, ids, running, until
from support.api.fake_engine import VECTOR, FakeEngine, FakeStream, Scripted, model_info

from chairlift.api.admission.keys import KeyLimits
from chairlift.engine.messages import Submit


def empty_reply(request: Submit, index: int) -> Scripted:
    """A script that generates empty_reply, so that only the prompt is computed."""
    return Scripted([], finish="length")


async def test_an_embedding_computes_only_the_prompt() -> None:
    async with running(FakeEngine(model_info(), empty_reply), embedding_pooling="last") as server:
        body = {"input": ["ab", "c"], "cache_salt": "tenant"}
        status, reply = await server.post("/v1/embeddings", body)
        assert status == 200
        assert reply == {
            "data": [
                {"embedding": pytest.approx([0.6, 0, 0.8, 0]), "index": i, "object": "embedding"}
                for i in range(2)
            ],
            "model": "org/tiny",
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
            "object": "list",
        }
        submitted = [
            (s.prompt, s.params.max_tokens, s.pooling, s.cache_salt)
            for s in server.engine.submitted
        ]
        assert submitted == [(ids("ab"), 0, "last", "tenant"), (ids("c"), 0, "last", "tenant")]
        plain = {"input": [[65, 66]], "pooling": "mean", "normalize": False, "dimensions": 3}
        _, reply = await server.post("/v1/embeddings", {**plain, "encoding_format": "base64"})
        assert server.engine.submitted[-1].pooling == "mean"
        raw = base64.b64decode(reply["data"][0]["embedding"])
        assert array("f", raw) == VECTOR[:3]
        cut = {"input": "abcdef", "truncate_prompt_tokens": 2}
        _, reply = await server.post("/v1/embeddings", cut)
        assert reply["usage"]["prompt_tokens"] == 2


async def test_texts_and_tokens_of_any_length_are_truncated() -> None:
    async with running(FakeEngine(model_info(), empty_reply)) as server:
        for most, expected in ((3, 3), (-1, 2048)):
            for given in ("ab" * 100_000, [65, 66] * 100_000):
                body = {"input": given, "truncate_prompt_tokens": most}
                status, reply = await server.post("/v1/embeddings", body)
                assert (status, reply["usage"]["prompt_tokens"]) == (200, expected)
            # An id that is not in the vocabulary is the client's error, however many there are.
            body = {"input": [65, 2**70] * 100_000, "truncate_prompt_tokens": most}
            status, reply = await server.post("/v1/embeddings", body)
            assert (status, reply["error"]["param"]) == (400, "input")
        status, reply = await server.post("/v1/embeddings", {"input": "ab" * 100_000})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        status, reply = await server.post("/api/embed", {"input": "ab" * 100_000})
        assert (status, reply["prompt_eval_count"]) == (200, 2048)


async def test_other_requests_go_on_while_vectors_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand vectors of 4,096 numbers take two seconds."""
    turns = 0
    seen: list[int] = []

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    encode = msgspec.json.encode

    def spy(value: Any) -> bytes:
        seen.append(turns)
        return encode(value)

    monkeypatch.setattr(msgspec.json, "encode", spy)
    async with running(FakeEngine(model_info(), empty_reply)) as server:
        other = asyncio.create_task(turn())
        for path, name in (("/v1/embeddings", "data"), ("/api/embed", "embeddings")):
            seen.clear()
            _, reply = await server.post(path, {"input": ["a"] * 20})
            assert len(reply[name]) == 20
            assert len(set(seen)) >= 20
        other.cancel()


async def test_more_texts_than_rows_are_computed_in_turn() -> None:
    """At most eight run at a time; LangChain sends a thousand in one request."""
    engine = FakeEngine(model_info(), empty_reply)
    submit = engine.submit
    streams: list[FakeStream] = []
    max_running = 0

    def watched(request: Submit) -> FakeStream:
        nonlocal max_running
        streams.append(submit(request))
        max_running = max(max_running, sum(bool(stream.running) for stream in streams))
        return streams[-1]

    engine.submit = watched  # type: ignore[method-assign]
    async with running(engine) as server:
        texts = [chr(97 + i % 26) for i in range(100)]
        status, reply = await server.post("/v1/embeddings", {"input": texts})
        assert status == 200
        assert [one["index"] for one in reply["data"]] == list(range(100))
        assert reply["usage"]["prompt_tokens"] == 100
    assert [s.prompt for s in engine.submitted] == [ids(text) for text in texts]
    assert max_running == 8


@pytest.mark.parametrize(
    ("change", "info", "param"),
    [
        ({}, {"hidden_size": None}, "model"),
        ({"dimensions": 5}, {}, "dimensions"),
        ({"dimensions": 0}, {}, "dimensions"),
        ({"pooling": "max"}, {}, "pooling"),
        ({"encoding_format": "int8"}, {}, "encoding_format"),
        ({"input": ""}, {}, "input"),
        ({"input": []}, {}, "input"),
        ({"input": ["a", 1]}, {}, "input"),
        ({"input": ["a"] * 2049}, {}, "input"),
        ({"input": "a" * 2049}, {}, "input"),
        ({"truncate_prompt_tokens": 0}, {}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_embedding_requests_are_refused(
    change: dict[str, Any], info: dict[str, Any], param: str
) -> None:
    async with running(FakeEngine(model_info(**info), empty_reply)) as server:
        status, reply = await server.post("/v1/embeddings", {"input": "x", **change})
        assert (status, reply["error"]["param"]) == (400, param)
        assert not server.engine.submitted


async def test_failures_and_limits_of_embeddings() -> None:
    def broken(request: Submit, index: int) -> Scripted:
        return Scripted([], finish="error", error="not finite")

    async with running(FakeEngine(model_info(), broken)) as server:
        status, reply = await server.post("/v1/embeddings", {"input": "x"})
        assert (status, reply["error"]["message"]) == (500, "not finite")
    slow = FakeEngine(model_info(), empty_reply, first_step_seconds=30)
    async with running(slow, anonymous=KeyLimits(None, 4, None)) as server:
        body = {"input": ["ab", "cd"], "timeout": 0.2}
        status, reply = await server.post("/v1/embeddings", body)
        assert (status, reply["error"]["code"]) == (504, "timeout")
        assert len(slow.closed) == 2
        status, reply = await server.post("/v1/embeddings", {"input": "abc"})
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
    async with running(FakeEngine(model_info(), empty_reply, first_step_seconds=30)) as server:
        asking = asyncio.create_task(server.post("/v1/embeddings", {"input": "x"}))
        await until(lambda: server.engine.submitted)
        asking.cancel()
        await until(lambda: server.engine.closed)


async def test_an_echo_has_the_logprobs_of_the_prompt_and_of_the_end_token() -> None:
    """Clients that want only the prompt's log-probabilities drop the last entry."""

    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("!"), END][: request.params.max_tokens], ended_by_token=True)

    body = {"prompt": "héé", "echo": True, "logprobs": 2, "max_tokens": 2}
    async with running(FakeEngine(model_info(), script)) as server:
        _, reply = await server.post("/v1/completions", body)
        [choice] = reply["choices"]
        assert choice["text"] == "héé!"
        logprobs = choice["logprobs"]
        a, b = "bytes:\\xc3", "bytes:\\xa9"
        assert logprobs["tokens"] == ["h", a, b, a, b, "!", "<|im_end|>"]
        assert logprobs["token_logprobs"] == [None, *[-0.25] * 4, -0.5, -0.5]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 3, 4]
        assert logprobs["top_logprobs"][0] is None
        assert max(logprobs["top_logprobs"][1].values()) == -0.25
        assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * 6
        chunks = await server.chunks("/v1/completions", body)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for key in logprobs:
            assert [entry for part in parts if part for entry in part[key]] == logprobs[key]
        _, reply = await server.post("/v1/completions", {**body, "logprobs": 0})
        assert reply["choices"][0]["logprobs"]["top_logprobs"] is None
        _, reply = await server.post("/v1/completions", {**body, "echo": False})
        assert reply["choices"][0]["logprobs"]["tokens"] == ["!"]
        assert server.engine.submitted[-1].prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echo_does_not_block_the_event_loop(stream: bool) -> None:
    """Its log-probabilities are encoded in a thread, once for all choices."""
    body = {"prompt": [ord("a")] * 10_000, "echo": True, "logprobs": 2, "n": 2, "stream": stream}
    turns: list[float] = []

    async def turn() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0)

    async with running(FakeEngine(model_info(max_context=16_384), ending("!"))) as server:
        gc.freeze()  # as the real server does
        turning = asyncio.create_task(turn())
        url = f"{server.url}/v1/completions"
        async with server.http.post(url, json=body) as response:
            assert response.status == 200
            await response.read()
        turning.cancel()
        gc.unfreeze()
    stalled = max(after - before for before, after in pairwise(turns))
    assert stalled < (turns[-1] - turns[0]) / 2
