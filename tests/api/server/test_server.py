"""The real server with the default model, over a real socket, with the official client."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai import AsyncOpenAI
from support.api.server import (
    CHAIRLIFT,
    GREEDY,
    PATIENCE,
    SAMPLED,
    Metrics,
    Server,
    free_port,
    serving,
)
from support.models import default_model_path
from support.tiny import tiny_model_dir

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.metrics.table import ENGINE, MODEL, SERVER

# Far more tokens than any test waits for.
ENDLESS = 4000

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SEA = "The sea is"
UNENDING: Mapping[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


async def until_metric(server: Server, name: str, value: float, **labels: str) -> Metrics:
    """The first scrape in which a metric has a value."""
    deadline = time.monotonic() + PATIENCE
    while (metrics := server.metrics()).total(name, **labels) != value:
        assert time.monotonic() < deadline, f"{name} is not {value}"
        await asyncio.sleep(0.02)
    return metrics


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


def lenient(client: AsyncOpenAI) -> AsyncOpenAI:
    """For completion streams: the strict client refuses the null finish_reason of OpenAI's own."""
    return client.with_options(_extra_kwargs={"_strict_response_validation": False})


async def token_ids(client: AsyncOpenAI, text: str) -> list[int]:
    root = str(client.base_url).removesuffix("/v1/")
    reply = await client.post(f"{root}/tokenize", body={"prompt": text}, cast_to=object)
    assert isinstance(reply, dict)
    tokens: list[int] = reply["tokens"]
    return tokens


async def streamed(client: AsyncOpenAI, prompt: str, **options: Any) -> tuple[list[str], str]:
    """A completion stream's pieces of text and its finish reason."""
    pieces: list[str] = []
    finishes: list[str] = []
    stream = await lenient(client).completions.create(prompt=prompt, stream=True, **options)
    async with stream:
        async for chunk in stream:
            pieces += [choice.text for choice in chunk.choices if choice.text]
            finishes += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    (finish,) = finishes
    return pieces, finish


async def greedy_text(client: AsyncOpenAI, prompt: str, max_tokens: int, **options: Any) -> str:
    reply = await client.completions.create(
        prompt=prompt, max_tokens=max_tokens, **GREEDY, **options
    )
    return reply.choices[0].text


# Chat


async def test_chat(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(messages=FRANCE, **GREEDY)
    (choice,) = reply.choices
    assert "Paris" in str(choice.message.content)
    assert choice.finish_reason == "stop"
    assert reply.model == DEFAULT_MODEL
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 10
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


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


async def test_three_doors_lead_to_the_same_line(server: Server, client: AsyncOpenAI) -> None:
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
    # What has been said is not computed again.
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


# Completions


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


async def test_streams_at_once_equal_the_same_alone(client: AsyncOpenAI) -> None:
    asked = [
        (" ".join(["The river runs on."] * repeats) + " And then", tokens)
        for repeats, tokens in zip((1, 40, 3, 20, 2, 9, 30, 5), range(6, 22, 2), strict=True)
    ]
    together = await asyncio.gather(
        *(streamed(client, prompt, max_tokens=tokens, **GREEDY) for prompt, tokens in asked)
    )
    for (prompt, tokens), reply in zip(asked, together, strict=True):
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


async def test_end_of_text_can_be_put_off(client: AsyncOpenAI) -> None:
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


# Trouble


async def test_a_client_that_leaves_frees_its_row(server: Server, client: AsyncOpenAI) -> None:
    before = server.metrics()
    stream = await lenient(client).completions.create(
        prompt=SEA, max_tokens=ENDLESS, stream=True, **GREEDY, **UNENDING
    )
    async with stream:
        await anext(aiter(stream))
        assert server.metrics().total("vllm:num_requests_running") == 1
    after = await until_metric(server, "vllm:num_requests_running", 0)

    def gained(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert gained("vllm:request_success_total", finished_reason="abort") == 1
    assert gained("chairlift_client_disconnects_total") == 1
    assert 0 < gained("vllm:generation_tokens_total") < ENDLESS / 4


async def test_malformed_bodies_do_not_hurt_the_others(server: Server, client: AsyncOpenAI) -> None:
    expected = await greedy_text(client, SEA, 24, **UNENDING)
    running = asyncio.create_task(streamed(client, SEA, max_tokens=24, **GREEDY, **UNENDING))
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


async def test_a_full_queue_is_a_429_until_there_is_room(tiny: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(tiny), "--max-rows", "1", "--max-queue", "1") as server:
        async with server.client() as client:
            ask = {"model": tiny.name, "prompt": "ab", "temperature": 0}
            endless = {**ask, "max_tokens": ENDLESS, "stream": True, **UNENDING}
            running = await lenient(client).completions.create(**endless)
            waiting = await lenient(client).completions.create(**endless)
            with pytest.raises(openai.RateLimitError) as refusal:
                await client.completions.create(max_tokens=4, **ask)
            assert int(refusal.value.response.headers["Retry-After"]) > 0
            assert refusal.value.code == "queue_full"
            await running.close()
            await waiting.close()
            await until_metric(server, "vllm:request_success_total", 2, finished_reason="abort")
            reply = await client.completions.create(max_tokens=4, **ask, **UNENDING)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 4
        rejected = server.metrics().total("chairlift_requests_rejected_total", reason="queue_full")
        assert rejected == 1


async def test_sigterm_lets_streams_finish_but_not_for_ever(tiny: Path, tmp_path: Path) -> None:
    ask = {"model": tiny.name, "prompt": "ab", "temperature": 0, **UNENDING}
    with serving(tmp_path, str(tiny), "--max-rows", "32", "--drain-timeout", "8") as server:
        async with server.client() as client:
            # Nobody reads it, and it is more than the socket's buffers take: it never ends.
            unread = await lenient(client).completions.create(
                max_tokens=ENDLESS, n=24, stream=True, **ask
            )
            short = await lenient(client).completions.create(max_tokens=300, stream=True, **ask)
            async with short:
                chunks = aiter(short)
                await anext(chunks)
                server.process.terminate()
                finishes = [chunk.choices[0].finish_reason async for chunk in chunks]
            assert finishes[-1] == "length"
            assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
            await unread.close()


@pytest.mark.parametrize("kept", [0.01, 0.99], ids=["header cut", "weights cut"])
def test_a_truncated_file_is_one_line_and_exit_code_1(kept: float, tmp_path: Path) -> None:
    whole = default_model_path()
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(whole, cut)
    with cut.open("r+b") as file:
        file.truncate(int(whole.stat().st_size * kept))
    done = subprocess.run(
        [CHAIRLIFT, "serve", str(cut), "--port", str(free_port()), "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("chairlift: error: ")
    assert "cut.gguf" in line


# After all of the above


async def test_metrics_tell_what_was_served(server: Server, client: AsyncOpenAI) -> None:
    before = server.metrics()
    for _ in range(2):
        await greedy_text(client, SEA, 4)
    await client.completions.create(prompt=[SEA, SEA], n=2, max_tokens=3, **GREEDY)
    await client.chat.completions.create(messages=FRANCE, **GREEDY)
    after = server.metrics()

    def gained(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    success = "vllm:request_success_total"
    assert gained(success, finished_reason="length") == 6
    assert gained(success, finished_reason="stop") == 1
    assert gained(success) == 7
    assert gained("vllm:generation_tokens_total") == gained("vllm:request_generation_tokens_sum")
    assert gained("vllm:request_params_n_count") == 5
    prompt = len(await token_ids(client, SEA))
    chat = gained("vllm:prompt_tokens_total") - 4 * prompt
    assert gained("vllm:request_prompt_tokens_sum") == 6 * prompt + chat
    assert gained("chairlift_http_requests_total", route="/v1/completions", status="200") == 3
    assert gained("chairlift_http_requests_total", route="/v1/chat/completions") == 1

    assert {metric.name for metric in (*SERVER, *MODEL, *ENGINE)} <= after.families
    assert after.total(success, finished_reason="error") == 0
    for histogram in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert after.total(f"vllm:{histogram}_count") == after.total(success)
    for info in ("vllm:cache_config_info", "chairlift_build_info"):
        assert after.total(info) == 1
    # A row that ended by its text leaves with the step after.
    await until_metric(server, "vllm:kv_cache_usage_perc", 0)
    assert server.metrics().total("vllm:num_requests_running") == 0
    assert server.metrics().total("vllm:num_requests_waiting") == 0
