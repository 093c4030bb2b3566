"""The requests of ``vllm bench serve``, and how it reads the replies.

The package itself needs torch and CUDA's libraries; its requests are rewritten here after
vllm/benchmarks/lib of 2026.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from support.api.server import Server

pytestmark = pytest.mark.system

OUTPUT = 12


def _draft_counters(server: Server) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    assert any(line.startswith("vllm:num_requests_running") for line in lines)
    return [line for line in lines if line.startswith("vllm:spec_decode")]


@pytest.fixture(scope="module", autouse=True)
def counters_before(tiny_server: Server) -> list[str]:
    """The counters before the requests of this file; tests of other clients have drafts."""
    return _draft_counters(tiny_server)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@dataclass
class Measured:
    """The benchmark's figures of one reply."""

    text: str = ""
    chunks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    done: bool = False


async def _measure(http: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> Measured:
    """Reads a stream as the benchmark does: it skips comments; a chunk with choices is a token."""
    measured, rest = Measured(), ""
    headers = {"x-request-id": "bench-7", "Content-Type": "application/json"}
    async with http.post(url, json=payload, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["x-request-id"] == "bench-7"
        async for part in reply.content.iter_any():
            rest += part.decode()
            while "\n\n" in rest:
                event, rest = rest.split("\n\n", 1)
                if event.startswith(":"):
                    continue
                assert event.startswith("data: ")
                if (data := event.removeprefix("data: ")) == "[DONE]":
                    measured.done = True
                    continue
                chunk = json.loads(data)
                if choices := chunk.get("choices"):
                    measured.chunks += 1
                    choice = choices[0]
                    text = (
                        choice["delta"].get("content") if "delta" in choice else choice.get("text")
                    )
                    measured.text += text or ""
                elif usage := chunk.get("usage"):
                    measured.output_tokens = usage["completion_tokens"]
                    measured.prompt_tokens = usage["prompt_tokens"]
    return measured


async def _first_model(http: aiohttp.ClientSession, server: Server) -> str:
    """The model that the benchmark uses without --model; its tokenizer is that of ``root``."""
    async with http.get(f"{server.url}/v1/models") as reply:
        [model] = (await reply.json())["data"]
    assert model["root"] == "tiny-llama"
    return str(model["id"])


def _completion(model: str, prompt: str | list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_completions(tiny_server: Server, http: aiohttp.ClientSession) -> None:
    """One request to test the server, then all at once."""
    model = await _first_model(http, tiny_server)
    url = f"{tiny_server.url}/v1/completions"
    probe = await _measure(http, url, _completion(model, "ready?"))
    assert probe.chunks > 0
    prompts: list[str | list[int]] = ["a" * (5 + i) for i in range(6)]
    requests = [_measure(http, url, _completion(model, prompt)) for prompt in (*prompts, [7, 8, 9])]
    for prompt, measured in zip(
        (*prompts, [7, 8, 9]), await asyncio.gather(*requests), strict=True
    ):
        assert (measured.output_tokens, measured.prompt_tokens) == (OUTPUT, len(prompt))
        assert measured.done
        assert measured.chunks > 1


async def test_chat_completions(tiny_server: Server, http: aiohttp.ClientSession) -> None:
    model = await _first_model(http, tiny_server)
    payload = {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": OUTPUT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    measured = await _measure(http, f"{tiny_server.url}/v1/chat/completions", payload)
    assert (measured.output_tokens, measured.done) == (OUTPUT, True)
    assert measured.prompt_tokens > len("Hello")
    assert measured.text


async def test_embeddings(tiny_server: Server, http: aiohttp.ClientSession) -> None:
    payload = {"model": await _first_model(http, tiny_server), "input": ["a b", "c"]}
    payload |= {"truncate_prompt_tokens": -1}
    async with http.post(f"{tiny_server.url}/v1/embeddings", json=payload) as reply:
        assert reply.status == 200
        assert (await reply.json())["usage"]["prompt_tokens"] == 4


def test_metrics_have_the_counters_of_speculation(
    tiny_server: Server, counters_before: list[str]
) -> None:
    """The benchmark looks for counters of drafts before and after a run."""
    counters = _draft_counters(tiny_server)
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert any(line.startswith(f"vllm:spec_decode_num_{name}_total{{") for line in counters)
    assert any('position="0"' in line for line in counters)
    assert counters == counters_before
