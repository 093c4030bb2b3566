"""Further requests of LlamaIndex, DSPy and smolagents, and those of Vercel's AI SDK.

Each has the fields that the library sends to /v1/chat/completions according to its source; texts
and schemas are our own. Requests of the AI SDK to /v1/responses are in test_agents.py.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import jsonschema
import pytest
from support.api.weather_question import MODEL, QUESTION, WEATHER

pytestmark = pytest.mark.system

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Basel", "days": 1}'},
}
CITY: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "alpine": {"type": "boolean"}},
    "required": ["name", "alpine"],
    "additionalProperties": False,
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


# LlamaIndex: OpenAILike. Its function-calling agents stream, as do structured predictions.
LLAMA_INDEX = {"temperature": 0.1, "max_tokens": 60, "parallel_tool_calls": False}
# smolagents: OpenAIServerModel. Results of tools come back as texts of the user.
STOPS = ["Observation:", "Calling tools:"]
# Vercel's AI SDK: createOpenAICompatible with includeUsage.
AI_SDK = {"max_tokens": 60, "temperature": 0, "stream_options": {"include_usage": True}}

CALLS: dict[str, dict[str, Any]] = {
    "llama-index": {
        **LLAMA_INDEX,
        "messages": [{"role": "system", "content": "You are an agent."}, user(QUESTION)],
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "llama-index, structured": {
        **LLAMA_INDEX,
        "messages": [user(QUESTION)],
        "tools": [{"type": "function", "function": {**TOOL["function"], "strict": False}}],
        "tool_choice": NAMED,
    },
    "smolagents": {
        "messages": [parts("system", "You are an expert assistant."), parts("user", QUESTION)],
        "stop": STOPS,
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "ai-sdk": {
        **AI_SDK,
        "messages": [user(QUESTION)],
        "tools": [TOOL],
        "tool_choice": NAMED,
    },
}
TEXTS: dict[str, dict[str, Any]] = {
    "llama-index, after a call": {
        **LLAMA_INDEX,
        "messages": [
            user(QUESTION),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
    },
    "dspy, ChatAdapter": {
        "messages": [
            {"role": "system", "content": "Your input fields are:\n1. `question` (str):"},
            user("[[ ## question ## ]]\n1 + 1?\n\nRespond with [[ ## answer ## ]]."),
        ],
        "temperature": None,
        "max_tokens": 60,
    },
    "smolagents, CodeAgent after a step": {
        "messages": [
            parts("system", "You write code."),
            parts("user", "New task:\n1 + 1?"),
            parts("assistant", "Thought: add.\n<code>\nprint(1 + 1)\n</code>"),
            parts("user", "Observation:\nExecution logs:\n2\n"),
        ],
        "stop": [*STOPS, "</code>"],
        "max_tokens": 60,
        "stream_options": {"include_usage": True},
    },
    "ai-sdk, after a call": {
        **AI_SDK,
        "messages": [
            user(QUESTION),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"sky":"sunny"}'},
        ],
        "tools": [TOOL],
        "tool_choice": "none",
    },
}
SCHEMA = {"name": "response", "schema": CITY, "strict": True}
OBJECTS: dict[str, dict[str, Any]] = {
    "dspy, JSONAdapter": {
        "messages": [user("[[ ## question ## ]]\nName a town.")],
        "temperature": 0.0,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    },
    "ai-sdk, with supportsStructuredOutputs": {
        **AI_SDK,
        "messages": [user("Name a town.")],
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    },
}


async def reply_to(base_url: str, body: dict[str, Any], streamed: bool) -> dict[str, Any]:
    """The message of the reply; the deltas of a stream are put together."""
    fields = {**body, "model": MODEL, "stream": streamed}
    if not streamed:
        fields.pop("stream_options", None)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/chat/completions", json=fields) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    if not streamed:
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        return message
    *lines, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert not any("error" in chunk for chunk in chunks)
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    return joined([choice["delta"] for chunk in chunks for choice in chunk["choices"]])


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for piece in delta.get("tool_calls") or ():
            function = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
            for name, value in piece["function"].items():
                function["function"][name] += value or ""
    content = "".join(delta.get("content") or "" for delta in deltas)
    return {"content": content, "tool_calls": [calls[index] for index in sorted(calls)]}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_the_tool_is_called(base_url: str, name: str, streamed: bool) -> None:
    message = await reply_to(base_url, CALLS[name], streamed)
    assert not message["content"]
    call = message["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    jsonschema.validate(json.loads(call["arguments"]), WEATHER)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", TEXTS)
async def test_the_reply_is_a_text(base_url: str, name: str, streamed: bool) -> None:
    body = TEXTS[name]
    message = await reply_to(base_url, body, streamed)
    assert message["content"]
    assert not any(stop in message["content"] for stop in body.get("stop", ()))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
async def test_the_reply_is_an_object(base_url: str, name: str, streamed: bool) -> None:
    message = await reply_to(base_url, OBJECTS[name], streamed)
    jsonschema.validate(json.loads(message["content"]), CITY)
