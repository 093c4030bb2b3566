"""Bodies of every API in which random values are replaced, removed or added.

The server answers each of them in JSON, and no error is its own.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.api.api_server import engine_replying, running

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 1}},
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
TURNS = [
    {"role": "system", "content": "s"},
    USER,
    {"role": "assistant", "content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": PARAMETERS},
}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a"], "n": 1, "top_k": 3}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": TURNS, "max_tokens": 5, "tools": [TOOL], "tool_choice": "auto"}
        | {"logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.0}, "metadata": {"a": "b"}}
        | SAMPLING,
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "response_format": SCHEMA_FORMAT, "stream": True}
        | {"stream_options": {"include_usage": True}},
    ),
    ("/v1/completions", {"prompt": ["a", [1, 2]], "max_tokens": 3, "logprobs": 2} | SAMPLING),
    ("/v1/embeddings", {"input": ["a"], "encoding_format": "float"}),
    (
        "/v1/responses",
        {"input": [USER | {"content": [{"type": "input_text", "text": "hi"}]}]}
        | {"tools": [{"type": "function", **FUNCTION}], "text": {"format": {"type": "text"}}}
        | {"reasoning": {"effort": "low"}, "store": False, "max_output_tokens": 16},
    ),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5, "system": [{"type": "text", "text": "s"}]}
        | {"tools": [{"name": "f", "input_schema": PARAMETERS}], "tool_choice": {"type": "auto"}}
        | {"thinking": {"type": "disabled"}, "stop_sequences": ["x"]},
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "hi"}], "stream": False, "format": PARAMETERS}
        | {"options": {"num_predict": 3, "stop": ["a"]}, "tools": [TOOL], "keep_alive": "5m"},
    ),
    ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 3}}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 3}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2, 0.5, 1e308, -1e308, 1e-40, 5.0, 2**63, -(2**63), 10**40),
    *("", "a", "\ud800", "x" * 3000, "\x00", "NaN", "auto", "none", "data:image/png;base64,AA"),
    *([], [[]], [None], [1, "a"], {}, [{}], {"a": 1}, {"": {}}, {"type": "text"}),
    *({"type": "object"}, {"$ref": "#"}, {"$ref": "#/x"}, {"type": ["string", "null"]}),
]
NAMES = ["unknown", "type", "content", "text", "name", "stream", "schema", "$ref", "items"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with each of its keys."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        container, key = rng.choice([*_places(body), (body, "unknown")])
        match rng.randrange(6):
            case 0:
                container.pop(key) if isinstance(container, list) else container.pop(key, None)
            case 1 if isinstance(container, dict):
                container[rng.choice(NAMES)] = copy.deepcopy(rng.choice(VALUES))
            case 2 if isinstance(container, list):
                container.extend(copy.deepcopy(container[:3]) * rng.choice([1, 20]))
            case _:
                container[key] = copy.deepcopy(rng.choice(VALUES))
    return body


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_mutated_bodies(seed: int) -> None:
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    async with running(engine_replying("Hello")) as server:
        for _ in range(1500):
            path, body = rng.choice(BODIES)
            sent = json.dumps(_mutated({"model": "org/tiny", **body}, rng)).encode()
            headers = {"Content-Type": "application/json"}
            async with server.http.post(server.url + path, data=sent, headers=headers) as reply:
                text = await reply.read()
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
            assert reply.status < 500 or reply.status == 501, (path, sent, text)
            if reply.status != 200:
                assert "error" in json.loads(text), (path, sent, text)
        assert await server.get("/health")
    assert statuses[200] > 100
    assert statuses[400] > 100
