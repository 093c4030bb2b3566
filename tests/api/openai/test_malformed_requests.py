"""Malformed requests get a 400 that names the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import (
    CHAT,
    Running,
    chosen,
    engine_replying,
    running,
    tool,
)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


def nested(depth: int) -> str:
    """JSON of objects nested ``depth`` deep."""
    return '{"a": ' * depth + "{}" + "}" * depth


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ["x"]}, "cache_salt"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"priority": 10**30}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": "1"}, "priority"),
    ({"priority": True}, "priority"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 129}, "n"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "tools"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools"),
    ({"tools": [tool("f")] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice"),
    ({"tool_choice": chosen("g"), "tools": [tool("f")]}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": json.loads(nested(100))}, "chat_template_kwargs"),
    ({"tools": [tool("f", json.loads(nested(100)))]}, "tools[0].function.parameters"),
    ({"guided_json": json.loads(nested(100))}, "guided_json"),
    ({"tools": [tool("f")], "guided_json": nested(2000)}, "guided_json"),
    ({"thinking_token_budget": 10}, "thinking_token_budget"),
    ({"tools": [tool("f")], "guided_regex": "a"}, "guided_regex"),
    ({"tools": [tool("f")], "guided_json": "true"}, "guided_json"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {}}, "prediction.type"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": ["text"]}, "prediction"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": {"type": "text"}}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": ["a"]}}, "prediction.content"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content",
    ),
    (
        {"prediction": {"type": "content", "content": [{"type": "refusal", "refusal": "a"}]}},
        "prediction.content",
    ),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": 1}]}},
        "prediction.content",
    ),
    ({"prediction": {"type": "content", "content": "a" * 5000}}, "prediction"),
    ({"prediction": {"type": "content", "content": "a" * 100_000}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"guided_json": []}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "param"), BAD_FIELDS, ids=lambda part: str(part)[:40])
async def test_bad_chat_fields_are_named(
    server: Running, change: dict[str, Any], param: str
) -> None:
    status, body = await server.post("/v1/chat/completions", {**CHAT, **change})
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not server.engine.submitted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"] * 30}, "prompt"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "x", "cache_salt": True}, "cache_salt"),
    ],
)
async def test_bad_completion_fields_are_named(
    server: Running, body: dict[str, Any], param: str
) -> None:
    status, reply = await server.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{}",
        b'{"messages": "\xff"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_bodies_that_are_not_json_objects(server: Running, path: str, body: bytes) -> None:
    status, reply = await server.post(path, body)
    assert status == 400
    assert reply["error"]["message"]
    # The server still works.
    status, _ = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 200


async def test_wrong_content_types_and_encodings(server: Running) -> None:
    path = "/v1/completions"
    status, _ = await server.post(path, {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert status == 415
    zipped = gzip.compress(b'{"prompt": "x"}')
    status, _ = await server.post(path, zipped, **{"Content-Encoding": "gzip"})
    assert status == 200
    status, _ = await server.post(path, b"not gzip", **{"Content-Encoding": "gzip"})
    assert status == 400
