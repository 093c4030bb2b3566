"""The real server with the default model, over a real socket, with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from openai import AsyncOpenAI
from support.api.server import (
    GREEDY,
    PATIENCE,
    Server,
    serving,
    token_ids,
    until_metric,
)

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.metrics.table import ENGINE, MODEL, SERVER

pytestmark = pytest.mark.system
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SEA = "The sea is"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


async def test_chat(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(messages=FRANCE, **GREEDY)
    (choice,) = reply.choices
    assert "Paris" in str(choice.message.content)
    assert choice.finish_reason == "stop"
    assert reply.model == DEFAULT_MODEL
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 10
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_the_model_cards_sampling_is_the_default(client: AsyncOpenAI) -> None:
    card = await client.models.retrieve(DEFAULT_MODEL)
    assert card.model_extra is not None
    defaults = card.model_extra["default_sampling_params"]
    assert (defaults["temperature"], defaults["top_p"]) == (0.2, 0.9)
    fields: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": FRANCE, "max_tokens": 16}
    replies = [
        await client.chat.completions.create(**fields, seed=7, **sampling)
        for sampling in ({}, {"temperature": 0.2, "top_p": 0.9})
    ]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content


async def test_a_prediction_changes_the_usage_but_not_the_text(
    client: AsyncOpenAI, server: Server
) -> None:
    story = [{"role": "user", "content": "Count from one to ten, in words."}]
    plain = await client.chat.completions.create(messages=story, **GREEDY)
    text = str(plain.choices[0].message.content)
    before = server.metrics().total("vllm:spec_decode_num_accepted_tokens_total")
    predicted = await client.chat.completions.create(
        messages=story, prediction={"type": "content", "content": text}, **GREEDY
    )
    assert predicted.choices[0].message.content == text
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    assert predicted.usage is not None
    assert predicted.usage.completion_tokens == plain.usage.completion_tokens
    details = predicted.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    accepted = server.metrics().total("vllm:spec_decode_num_accepted_tokens_total") - before
    assert accepted == details.accepted_prediction_tokens


async def test_chat_stream(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=FRANCE, **GREEDY)
    stream = await client.chat.completions.create(
        messages=FRANCE, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    async with stream:
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    finishes = [choice.finish_reason for choice in choices]
    assert finishes == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_three_apis_give_the_same_reply(server: Server, client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(messages=FRANCE, **GREEDY)
    text = chat.choices[0].message.content
    first = await client.responses.create(input=FRANCE, **GREEDY)
    assert first.output_text == text
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="-", timeout=PATIENCE, _strict_response_validation=True
    ) as other:
        asked = {"model": DEFAULT_MODEL, "max_tokens": 1000, "messages": FRANCE}
        reply = await other.messages.create(**asked, extra_body={"temperature": 0})
        counted = await other.messages.count_tokens(model=DEFAULT_MODEL, messages=FRANCE)
    assert (reply.content[0].text, reply.stop_reason) == (text, "end_turn")
    assert chat.usage is not None
    assert counted.input_tokens == chat.usage.prompt_tokens
    # The first turn comes from the prefix cache.
    assert first.usage is not None
    second = await client.responses.create(
        input="And of Italy?", previous_response_id=first.id, max_output_tokens=8, **GREEDY
    )
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached > first.usage.input_tokens - 4


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        messages=FRANCE, logprobs=True, top_logprobs=5, **GREEDY
    )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 5
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (
            token.token,
            token.logprob,
        )


async def test_ignore_eos_and_min_tokens_delay_the_end(client: AsyncOpenAI) -> None:
    async def length(**extra: Any) -> tuple[int, str]:
        reply = await client.chat.completions.create(
            messages=FRANCE, max_tokens=20, extra_body=extra, **GREEDY
        )
        assert reply.usage is not None
        return reply.usage.completion_tokens, reply.choices[0].finish_reason

    natural, finish = await length()
    assert natural < 15
    assert finish == "stop"
    assert await length(ignore_eos=True) == (20, "length")
    assert (await length(min_tokens=15))[0] >= 15


async def test_metrics_count_what_was_served(server: Server, client: AsyncOpenAI) -> None:
    before = server.metrics()
    for _ in range(2):
        await client.completions.create(prompt=SEA, max_tokens=4, **GREEDY)
    await client.completions.create(prompt=[SEA, SEA], n=2, max_tokens=3, **GREEDY)
    await client.chat.completions.create(messages=FRANCE, **GREEDY)
    after = server.metrics()

    def increase(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    success = "vllm:request_success_total"
    assert increase(success, finished_reason="length") == 6
    assert increase(success, finished_reason="stop") == 1
    assert increase(success) == 7
    assert increase("vllm:generation_tokens_total") == increase(
        "vllm:request_generation_tokens_sum"
    )
    assert increase("vllm:request_params_n_count") == 5
    prompt = len(await token_ids(client, SEA))
    chat = increase("vllm:prompt_tokens_total") - 4 * prompt
    assert increase("vllm:request_prompt_tokens_sum") == 6 * prompt + chat
    assert increase("chairlift_http_requests_total", route="/v1/completions", status="200") == 3
    assert increase("chairlift_http_requests_total", route="/v1/chat/completions") == 1

    assert {metric.name for metric in (*SERVER, *MODEL, *ENGINE)} <= after.families
    assert after.total(success, finished_reason="error") == 0
    for histogram in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert after.total(f"vllm:{histogram}_count") == after.total(success)
    for info in ("vllm:cache_config_info", "chairlift_build_info"):
        assert after.total(info) == 1
    # A row that a stop string ended is released in the following step.
    await until_metric(server, "vllm:kv_cache_usage_perc", 0)
    assert server.metrics().total("vllm:num_requests_running") == 0
    assert server.metrics().total("vllm:num_requests_waiting") == 0
