"""Calls truncated by max_tokens, at every length and in every API, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.api_server import MESSAGES, TOKENIZER, Running, chosen, running, tool
from support.api.tool_calls import (
    JSON,
    TOKENIZERS,
    reply_both_ways,
    skip_grammar_check,
    truncating_engine,
)

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
ARGUMENTS = '{"a": "é}</"}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
MISTRAL = f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"


async def chat(server: Running, named: bool, limit: int) -> tuple[str, list[str], str]:
    body = {"messages": MESSAGES, "tools": [tool("f", PARAMETERS)], "max_tokens": limit}
    reply = await reply_both_ways(
        server, {**body, **({"tool_choice": chosen("f")} if named else {})}
    )
    return reply.content, [c["arguments"] for c in reply.calls], reply.finish or ""


async def responses(server: Running, named: bool, limit: int) -> tuple[str, list[str], str]:
    body: dict[str, Any] = {
        "input": "Hi",
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        "max_output_tokens": limit,
    }
    if named:
        body["tool_choice"] = {"type": "function", "name": "f"}
    _, reply = await server.post("/v1/responses", body)
    events = await server.named_events("/v1/responses", body)
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    assert "".join(deltas) == "".join(call["arguments"] for call in calls)
    streamed = events[-1]["response"]
    assert [item.get("arguments") for item in streamed["output"]] == [
        item.get("arguments") for item in reply["output"]
    ]
    for call in calls:
        complete = call["arguments"] == ARGUMENTS
        assert call["status"] == ("completed" if complete else "incomplete")
    text = "".join(
        part["text"]
        for item in reply["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    finish = "tool_calls" if reply["status"] == "completed" else "length"
    return text, [call["arguments"] for call in calls], finish


async def messages(server: Running, named: bool, limit: int) -> tuple[str, list[str], str]:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "max_tokens": limit,
    }
    if named:
        body["tool_choice"] = {"type": "tool", "name": "f"}
    status, reply = await server.post("/v1/messages", body)
    assert status == 200, reply
    events = await server.named_events("/v1/messages", body)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    calls = [block for block in reply["content"] if block["type"] == "tool_use"]
    # A stream sends an input as text; without a stream it is an object.
    streamed = "".join(delta["partial_json"] for delta in deltas if "partial_json" in delta)
    for call in calls:
        value = call["input"].get("a", "")
        assert json.loads(ARGUMENTS)["a"].startswith(value)
        assert json.dumps(value, ensure_ascii=False)[1:-1] in streamed
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    finish = {"max_tokens": "length", "tool_use": "tool_calls", "end_turn": "stop"}
    return text, [streamed] if calls else [], finish[reply["stop_reason"]]


APIS = [chat, responses, messages]
CASES: list[tuple[TokenizerWrapper, str, bool]] = [
    (TOKENIZER, CALL, True),  # the tags are text
    (JSON, CALL, True),  # the tags are tokens
    (TOKENIZER, f"So:\n{CALL}", False),
    (JSON, f"So:\n{CALL}", False),
    (TOKENIZERS["mistral"], f"So:\n{MISTRAL}", False),
    (TOKENIZERS["mistral"], CALL, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
@pytest.mark.parametrize("case", range(len(CASES)))
async def test_every_length_gives_a_beginning(api: Callable[..., Any], case: int) -> None:
    tokenizer, text, named = CASES[case]
    before = "" if named else "So:"
    size = len(tokenizer.encode(text, add_special_tokens=False)) + 1
    begun = 0  # lengths at which the call had begun
    async with running(truncating_engine(tokenizer, text), tokenizer) as server:
        skip_grammar_check(server)
        for limit in range(1, size + 1):
            content, calls, finish = await api(server, named, limit)
            where = (limit, content, calls, finish)
            assert before.startswith(content.rstrip()), where
            assert all(ARGUMENTS.startswith(arguments) for arguments in calls), where
            assert len(calls) <= 1, where
            # A single call's reply ends with its tag; others end with their last token.
            complete = limit == size or (named and limit >= size - 1)
            assert finish == ("tool_calls" if complete else "length"), where
            begun += bool(calls)
        assert calls == [ARGUMENTS]
        assert begun >= len(ARGUMENTS)


async def test_messages_return_an_input_as_the_model_wrote_it() -> None:
    """Half a surrogate pair and 1e999 are valid JSON that Python cannot represent."""
    arguments = '{"a": "\\ud83d", "b": 1e999, "c": 1.50}'
    text = CALL.replace(ARGUMENTS, arguments)
    body = {
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    async with running(truncating_engine(TOKENIZER, text), TOKENIZER) as server:
        skip_grammar_check(server)
        for limit in range(1, len(text) + 1):
            sent = {**body, "max_tokens": limit}
            async with server.http.post(f"{server.url}/v1/messages", json=sent) as response:
                assert response.status == 200
                reply = await response.text()
        assert f'"input":{arguments}' in reply
