"""What the API makes of what the engine tells of a prompt: embeddings, and an echo's logprobs."""

from __future__ import annotations

import asyncio
import base64
import gc
import time
from array import array
from itertools import pairwise
from typing import Any

import pytest
from support.api.api_server import END, ending, ids, running, until
from support.api.fake_engine import VECTOR, FakeEngine, Scripted, model_info

from chairlift.api.admission.keys import KeyLimits
from chairlift.engine.messages import Submit


def nothing(request: Submit, index: int) -> Scripted:
    """Only the prompt is computed."""
    return Scripted([], finish="length")


async def test_an_embedding_is_a_prompt_that_nothing_follows() -> None:
    async with running(FakeEngine(model_info(), nothing), embedding_pooling="last") as server:
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
        asked = [
            (s.prompt, s.params.max_tokens, s.pooling, s.cache_salt)
            for s in server.engine.submitted
        ]
        assert asked == [(ids("ab"), 0, "last", "tenant"), (ids("c"), 0, "last", "tenant")]
        plain = {"input": [[65, 66]], "pooling": "mean", "normalize": False, "dimensions": 3}
        _, reply = await server.post("/v1/embeddings", {**plain, "encoding_format": "base64"})
        assert server.engine.submitted[-1].pooling == "mean"
        raw = base64.b64decode(reply["data"][0]["embedding"])
        assert array("f", raw) == VECTOR[:3]
        cut = {"input": "abcdef", "truncate_prompt_tokens": 2}
        _, reply = await server.post("/v1/embeddings", cut)
        assert reply["usage"]["prompt_tokens"] == 2


async def test_more_texts_than_there_are_rows_come_one_after_the_other() -> None:
    """Eight at a time; LangChain sends a thousand in one request."""
    engine = FakeEngine(model_info(), nothing)
    open_at_most = 0
    submit = engine.submit

    def watched(request: Submit) -> Any:
        nonlocal open_at_most
        open_at_most = max(open_at_most, len(engine.submitted) + 1 - ended())
        return submit(request)

    def ended() -> int:
        return sum(choice.finish is not None for choice in generations())

    def generations() -> list[Any]:
        riding = server.service.live._open
        return [choice for generation in riding for choice in generation.choices]

    engine.submit = watched  # type: ignore[method-assign]
    async with running(engine) as server:
        texts = [chr(97 + i % 26) for i in range(100)]
        status, reply = await server.post("/v1/embeddings", {"input": texts})
        assert status == 200
        assert [one["index"] for one in reply["data"]] == list(range(100))
        assert reply["usage"]["prompt_tokens"] == 100
    assert [s.prompt for s in engine.submitted] == [ids(text) for text in texts]
    assert open_at_most == 8


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
async def test_embeddings_that_cannot_be_had(
    change: dict[str, Any], info: dict[str, Any], param: str
) -> None:
    async with running(FakeEngine(model_info(**info), nothing)) as server:
        status, reply = await server.post("/v1/embeddings", {"input": "x", **change})
        assert (status, reply["error"]["param"]) == (400, param)
        assert not server.engine.submitted


async def test_embeddings_fail_and_end_as_other_requests_do() -> None:
    def broken(request: Submit, index: int) -> Scripted:
        return Scripted([], finish="error", error="not finite")

    async with running(FakeEngine(model_info(), broken)) as server:
        status, reply = await server.post("/v1/embeddings", {"input": "x"})
        assert (status, reply["error"]["message"]) == (500, "not finite")
    slow = FakeEngine(model_info(), nothing, first_step_seconds=30)
    async with running(slow, anonymous=KeyLimits(None, 4, None)) as server:
        body = {"input": ["ab", "cd"], "timeout": 0.2}
        status, reply = await server.post("/v1/embeddings", body)
        assert (status, reply["error"]["code"]) == (504, "timeout")
        assert len(slow.closed) == 2
        status, reply = await server.post("/v1/embeddings", {"input": "abc"})
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
    async with running(FakeEngine(model_info(), nothing, first_step_seconds=30)) as server:
        asking = asyncio.create_task(server.post("/v1/embeddings", {"input": "x"}))
        await until(lambda: server.engine.submitted)
        asking.cancel()
        await until(lambda: server.engine.closed)


async def test_an_echo_has_its_logprobs_and_the_token_that_ends_it() -> None:
    """Who wants the prompt's leaves out the last one, whatever it is."""

    def script(request: Submit, index: int) -> Scripted:
        return Scripted([*ids("!"), END][: request.params.max_tokens], ended_by_token=True)

    asked = {"prompt": "héé", "echo": True, "logprobs": 2, "max_tokens": 2}
    async with running(FakeEngine(model_info(), script)) as server:
        _, reply = await server.post("/v1/completions", asked)
        [choice] = reply["choices"]
        assert choice["text"] == "héé!"
        told = choice["logprobs"]
        a, b = "bytes:\\xc3", "bytes:\\xa9"
        assert told["tokens"] == ["h", a, b, a, b, "!", "<|im_end|>"]
        assert told["token_logprobs"] == [None, *[-0.25] * 4, -0.5, -0.5]
        assert told["text_offset"] == [0, 1, 1, 2, 2, 3, 4]
        assert told["top_logprobs"][0] is None
        assert max(told["top_logprobs"][1].values()) == -0.25
        assert [len(top) for top in told["top_logprobs"][1:]] == [2] * 6
        chunks = await server.chunks("/v1/completions", asked)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for key in told:
            assert [entry for part in parts if part for entry in part[key]] == told[key]
        _, reply = await server.post("/v1/completions", {**asked, "logprobs": 0})
        assert reply["choices"][0]["logprobs"]["top_logprobs"] is None
        _, reply = await server.post("/v1/completions", {**asked, "echo": False})
        assert reply["choices"][0]["logprobs"]["tokens"] == ["!"]
        assert server.engine.submitted[-1].prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echo_holds_nobody_up(stream: bool) -> None:
    """Its log-probabilities are written down beside the loop, once for all choices."""
    asked = {"prompt": [ord("a")] * 10_000, "echo": True, "logprobs": 2, "n": 2, "stream": stream}
    turns: list[float] = []

    async def turn() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0)

    async with running(FakeEngine(model_info(max_context=16_384), ending("!"))) as server:
        gc.freeze()  # as the server does
        turning = asyncio.create_task(turn())
        url = f"{server.url}/v1/completions"
        async with server.http.post(url, json=asked) as response:
            assert response.status == 200
            await response.read()
        turning.cancel()
        gc.unfreeze()
    stalled = max(after - before for before, after in pairwise(turns))
    assert stalled < (turns[-1] - turns[0]) / 2
