"""Ollama's own Python client, unmodified, at /api."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import ollama
import pytest
from support.api.api_server import Running, ending, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.api.server import Server
from support.api.thinking_caller import ANSWER, CITIES, TEXT, THOUGHT, TOKENIZER, thinking_caller

from chairlift.api.admission.keys import ApiKey, KeyLimits, digest_of

NAME = "tiny-llama"
USER = {"role": "user", "content": "Hi"}
SHORT = {"num_predict": 8, "temperature": 1.0, "seed": 7}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


# A real server with a tiny model


@pytest.fixture
def client(tiny_server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(tiny_server.url) as client:
        yield client


def check_end(reply: Any, tokens: int | None = None) -> None:
    """The fields that end every generation."""
    assert reply.done
    assert reply.done_reason in ("stop", "length")
    assert reply.prompt_eval_count > 0
    assert tokens is None or reply.eval_count == tokens
    parts = reply.load_duration + reply.prompt_eval_duration + reply.eval_duration
    assert 0 < parts <= reply.total_duration


@pytest.mark.system
def test_chat(client: ollama.Client) -> None:
    for name in (NAME, f"{NAME}:latest"):
        reply = client.chat(name, [{"role": "system", "content": "Be brief"}, USER], options=SHORT)
        assert (reply.model, reply.message.role) == (name, "assistant")
        check_end(reply)
    again = client.chat(NAME, [USER, reply.message, USER], options=SHORT, keep_alive="5m")
    check_end(again)


@pytest.mark.system
def test_a_streamed_chat_adds_up_to_the_whole_reply(client: ollama.Client) -> None:
    whole = client.chat(NAME, [USER], options=SHORT)
    *parts, last = client.chat(NAME, [USER], options=SHORT, stream=True)
    assert not any(part.done for part in parts)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    check_end(last, whole.eval_count)
    assert last.done_reason == whole.done_reason


@pytest.mark.system
def test_tools_are_offered_from_python_functions(client: ollama.Client) -> None:
    def get_weather(city: str, days: int = 1) -> str:
        """The weather in a city.

        Args:
            city: The city's name.
            days: For how many days.
        """
        return f"{city}: sunny for {days}"

    # A random model calls nothing; test_calls_and_thoughts has a model that does.
    reply = client.chat(NAME, [USER], tools=[get_weather], options=SHORT)
    check_end(reply)
    prompt_tokens = client.chat(NAME, [USER], options=SHORT).prompt_eval_count or 0
    assert (reply.prompt_eval_count or 0) > prompt_tokens + 50


@pytest.mark.system
def test_format(client: ollama.Client) -> None:
    options = {**SHORT, "num_predict": 200}
    reply = client.chat(NAME, [USER], format=SCHEMA, options=options)
    assert isinstance(json.loads(reply.message.content or "")["a"], bool)
    generated = client.generate(NAME, "Hi", format=SCHEMA, options=options)
    assert isinstance(json.loads(generated.response or "")["a"], bool)


@pytest.mark.system
def test_generate(client: ollama.Client) -> None:
    whole = client.generate(NAME, "Hi", system="Be brief", options=SHORT)
    check_end(whole)
    *parts, last = client.generate(NAME, "Hi", system="Be brief", options=SHORT, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response
    check_end(last, whole.eval_count)
    raw = client.generate(NAME, "Hi", raw=True, options=SHORT)
    assert raw.prompt_eval_count == 2
    loaded = client.generate(NAME)
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")


@pytest.mark.system
def test_logprobs(client: ollama.Client) -> None:
    for reply in (
        client.generate(NAME, "Hi", logprobs=True, top_logprobs=2, options=SHORT),
        client.generate(NAME, "Hi", logprobs=True, top_logprobs=2, options=SHORT, raw=True),
        client.chat(NAME, [USER], logprobs=True, top_logprobs=2, options=SHORT),
    ):
        assert reply.logprobs
        assert all(one.logprob <= 0 and len(one.top_logprobs or ()) == 2 for one in reply.logprobs)


@pytest.mark.system
def test_embeddings(client: ollama.Client) -> None:
    reply = client.embed(NAME, ["one", "two"])
    assert [len(vector) for vector in reply.embeddings] == [64, 64]
    assert sum(value * value for value in reply.embeddings[0]) == pytest.approx(1, abs=1e-4)
    assert reply.prompt_eval_count == 6
    assert len(client.embed(NAME, "one", dimensions=3).embeddings[0]) == 3
    long = client.embed(NAME, "x" * 5000)
    assert long.prompt_eval_count == client.ps().models[0].context_length
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(NAME, "x" * 5000, truncate=False)
    old = client.embeddings(NAME, "one").embedding
    scale = sum(value * value for value in old) ** 0.5
    assert [value / scale for value in old] == pytest.approx(reply.embeddings[0], abs=1e-4)


@pytest.mark.system
def test_models_are_listed_and_described(client: ollama.Client) -> None:
    [listed] = client.list().models
    [loaded] = client.ps().models
    assert listed.model == loaded.model == f"{NAME}:latest"
    assert listed.size == loaded.size
    assert (listed.size or 0) > 0
    assert loaded.context_length == 4096
    for name in (NAME, f"{NAME}:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools"]
        assert "<|im_start|>" in (shown.template or "")
        info = shown.modelinfo or {}
        assert info[f"{info['general.architecture']}.context_length"] == 4096
        assert shown.details == listed.details


@pytest.mark.system
def test_errors(client: ollama.Client) -> None:
    calls: list[tuple[int, str, Any]] = [
        (404, "not found: .*llama3", lambda: client.chat("llama3", [USER])),
        (404, "llama3", lambda: list(client.chat("llama3", [USER], stream=True))),
        (404, "llama3", lambda: client.show("llama3")),
        (400, "images", lambda: client.generate(NAME, "Hi", images=["aGk="])),
        (400, "options.top_p", lambda: client.generate(NAME, "Hi", options={"top_p": 3})),
        (400, "options.mirostat", lambda: client.chat(NAME, [USER], options={"mirostat": 1})),
        (400, "suffix", lambda: client.generate(NAME, "Hi", "there")),
        (400, "think", lambda: client.chat(NAME, [USER], think=True)),
        (404, "no such route", lambda: client.pull("llama3")),
    ]
    for status, named, call in calls:
        with pytest.raises(ollama.ResponseError, match=named) as caught:
            call()
        assert caught.value.status_code == status


# A scripted model that thinks and calls


class Connected(NamedTuple):
    server: Running
    client: ollama.AsyncClient


@pytest.fixture
async def calling() -> AsyncIterator[Connected]:
    async with (
        running(thinking_caller(), TOKENIZER) as server,
        ollama.AsyncClient(server.url) as client,
    ):
        yield Connected(server, client)


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    return f"{city}: sunny"


async def test_calls_and_thoughts(calling: Connected) -> None:
    server, client = calling
    asked: list[Any] = [USER]
    reply = await client.chat("org/tiny", asked, tools=[get_weather], think=True)
    message = reply.message
    assert (message.content, message.thinking) == (TEXT, THOUGHT)
    calls = message.tool_calls or []
    assert [dict(call.function.arguments) for call in calls] == [{"city": c} for c in CITIES]
    assert reply.done_reason == "stop"
    for call in calls:
        result = get_weather(**call.function.arguments)
        asked += [{"role": "tool", "tool_name": call.function.name, "content": result}]
    answer = await client.chat("org/tiny", [USER, message, *asked[1:]], tools=[get_weather])
    assert answer.message.content == ANSWER
    prompt = TOKENIZER.decode(server.engine.submitted[-1].prompt)
    assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in prompt
    assert "tool\nBern: sunny" in prompt


async def test_calls_and_thoughts_in_a_stream(calling: Connected) -> None:
    stream = await calling.client.chat("org/tiny", [USER], tools=[get_weather], stream=True)
    messages = [part.message async for part in stream]
    assert "".join(message.content or "" for message in messages) == TEXT
    assert "".join(message.thinking or "" for message in messages) == THOUGHT
    calls = [call for message in messages for call in message.tool_calls or ()]
    assert [call.function.arguments["city"] for call in calls] == list(CITIES)


async def test_think_decides(calling: Connected) -> None:
    server, client = calling
    await client.generate("org/tiny", "Hi", think=False)
    assert TOKENIZER.decode(server.engine.submitted[-1].prompt).endswith("<think></think>")
    thought = await client.generate("org/tiny", "Hi", think="high")
    assert thought.thinking == THOUGHT


async def test_keys_and_failures() -> None:
    engine = FakeEngine(model_info(), ending("Hello"))
    keys = (ApiKey("alice", digest_of("sk-alice-secret"), KeyLimits(rpm=3)),)
    headers = {"Authorization": "Bearer sk-alice-secret"}
    async with (
        running(engine, keys=keys) as server,
        ollama.AsyncClient(server.url) as nobody,
        ollama.AsyncClient(server.url, headers=headers) as client,
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            await nobody.list()
        assert caught.value.status_code == 401
        reply = await client.chat("org/tiny", [USER], options={"stop": ["lo"]})
        assert (reply.message.content, reply.done_reason) == ("Hel", "stop")
        engine.script = lambda request, index: Scripted([65, 66], "error", error="it broke")
        with pytest.raises(ollama.ResponseError, match="it broke"):
            [part async for part in await client.chat("org/tiny", [USER], stream=True)]
        with pytest.raises(ollama.ResponseError, match="it broke"):
            await client.chat("org/tiny", [USER])
        with pytest.raises(ollama.ResponseError, match="rate limit") as caught:
            await client.chat("org/tiny", [USER])
        assert caught.value.status_code == 429
