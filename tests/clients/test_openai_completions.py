"""Text completions of a real server, with the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.api.server import (
    GREEDY,
    SAMPLED,
    Server,
    lenient,
    streamed,
    token_ids,
    until_metric,
)

pytestmark = pytest.mark.system
# Far more tokens than any test waits for.
ENDLESS = 4000
SEA = "The sea is"
IGNORE_EOS: Mapping[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


async def greedy_text(client: AsyncOpenAI, prompt: str, max_tokens: int, **options: Any) -> str:
    reply = await client.completions.create(
        prompt=prompt, max_tokens=max_tokens, **GREEDY, **options
    )
    return reply.choices[0].text


async def test_prompt_shapes_agree(client: AsyncOpenAI) -> None:
    ids = await token_ids(client, SEA)
    other = "Once upon a time"
    one = await client.completions.create(prompt=SEA, max_tokens=8, **GREEDY)
    assert one.usage is not None
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(ids), 8)
    assert one.choices[0].finish_reason == "length"
    tokens = await client.completions.create(prompt=ids, max_tokens=8, **GREEDY)
    texts = await client.completions.create(prompt=[SEA, other], max_tokens=8, **GREEDY)
    lists = await client.completions.create(
        prompt=[await token_ids(client, other), ids], max_tokens=8, **GREEDY
    )
    assert tokens.choices[0].text == one.choices[0].text == texts.choices[0].text
    assert lists.choices[1].text == one.choices[0].text
    assert lists.choices[0].text == texts.choices[1].text == await greedy_text(client, other, 8)


async def test_echo_and_n(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(prompt=SEA, echo=True, n=3, seed=7, **SAMPLED)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert all(text.startswith(SEA) for text in texts)
    assert len(set(texts)) == 3
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(await token_ids(client, SEA))


async def test_completion_logprobs(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(prompt=SEA, max_tokens=8, logprobs=5, **GREEDY)
    (choice,) = reply.choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.tokens or []
    assert "".join(tokens) == choice.text
    for token, logprob, top in zip(
        tokens,
        choice.logprobs.token_logprobs or [],
        choice.logprobs.top_logprobs or [],
        strict=True,
    ):
        assert len(top) == 5
        assert top[token] == logprob == max(top.values()) < 0


async def test_concurrent_streams_equal_the_same_streams_alone(client: AsyncOpenAI) -> None:
    prompts = [
        (" ".join(["The river runs on."] * repeats) + " And then", tokens)
        for repeats, tokens in zip((1, 40, 3, 20, 2, 9, 30, 5), range(6, 22, 2), strict=True)
    ]
    together = await asyncio.gather(
        *(streamed(client, prompt, max_tokens=tokens, **GREEDY) for prompt, tokens in prompts)
    )
    for (prompt, tokens), reply in zip(prompts, together, strict=True):
        alone = await streamed(client, prompt, max_tokens=tokens, **GREEDY)
        assert ("".join(reply[0]), reply[1]) == ("".join(alone[0]), alone[1])


async def test_a_seed_gives_the_same_text_whatever_else_runs(client: AsyncOpenAI) -> None:
    async def sample(seed: int) -> str:
        reply = await client.completions.create(prompt=SEA, seed=seed, **SAMPLED)
        return reply.choices[0].text

    alone = await sample(5)
    crowded = await asyncio.gather(*map(sample, (1, 2, 5, 3)))
    assert crowded[2] == alone
    assert len({alone, *crowded}) == 4


async def test_a_stop_string_across_tokens_never_leaks(client: AsyncOpenAI) -> None:
    pieces, _ = await streamed(client, SEA, max_tokens=16, **GREEDY)
    text = "".join(pieces)
    border = len("".join(pieces[: len(pieces) // 2]))
    stop = text[border - 2 : border + 2]
    cut, finish = await streamed(client, SEA, max_tokens=16, stop=stop, **GREEDY)
    assert "".join(cut) == text[: text.index(stop)]
    assert finish == "stop"


async def test_a_client_that_leaves_frees_its_row(server: Server, client: AsyncOpenAI) -> None:
    before = server.metrics()
    stream = await lenient(client).completions.create(
        prompt=SEA, max_tokens=ENDLESS, stream=True, **GREEDY, **IGNORE_EOS
    )
    async with stream:
        await anext(aiter(stream))
        assert server.metrics().total("vllm:num_requests_running") == 1
    after = await until_metric(server, "vllm:num_requests_running", 0)

    def increase(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert increase("vllm:request_success_total", finished_reason="abort") == 1
    assert increase("chairlift_client_disconnects_total") == 1
    assert 0 < increase("vllm:generation_tokens_total") < ENDLESS / 4


async def test_malformed_bodies_leave_running_streams_alone(
    server: Server, client: AsyncOpenAI
) -> None:
    expected = await greedy_text(client, SEA, 24, **IGNORE_EOS)
    running = asyncio.create_task(streamed(client, SEA, max_tokens=24, **GREEDY, **IGNORE_EOS))
    bodies: list[tuple[bytes, str | None]] = [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b"{}", "prompt"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": [999999]}', "prompt"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    ]
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as http:
        for body, param in bodies:
            async with http.post(f"{server.url}/v1/completions", data=body) as reply:
                assert reply.status == 400
                error = (await reply.json())["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"] == param
                assert error["message"]
    pieces, finish = await running
    assert ("".join(pieces), finish) == (expected, "length")
