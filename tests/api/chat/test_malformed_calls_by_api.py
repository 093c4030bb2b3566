"""Malformed free calls in every API: nothing is lost, and no client takes them for valid ones."""

from __future__ import annotations

import json

import pytest
from support.api.api_server import MESSAGES, running, tool
from support.api.tool_calls import JSON, TOKENIZERS, engine_writing, reply_both_ways

CASES = [
    ("json_tools", '<tool_call>\n{"name": "f", "arguments": {\'a\': 1}}\n</tool_call>', "{'a': 1}"),
    ("json_tools", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>x</parameter>\n</function>\n</tool_call>",
        "{<parameter=n>x</parameter>\n</function>\n",
    ),
]
F = tool("f", {"type": "object", "properties": {"n": {"type": "integer"}}})


@pytest.mark.parametrize(("parser", "text", "arguments"), CASES)
async def test_chat_completions_have_the_text(parser: str, text: str, arguments: str) -> None:
    tokenizer = TOKENIZERS[parser]
    async with running(engine_writing(tokenizer, text), tokenizer) as server:
        reply = await reply_both_ways(server, {"messages": MESSAGES, "tools": [F]})
        assert [(call["name"], call["arguments"]) for call in reply.calls] == [("f", arguments)]
        assert reply.content == ""


@pytest.mark.parametrize(("parser", "text", "arguments"), CASES)
async def test_responses_mark_the_call(parser: str, text: str, arguments: str) -> None:
    tokenizer = TOKENIZERS[parser]
    async with running(engine_writing(tokenizer, text), tokenizer) as server:
        sent = {"input": "Hi", "tools": [{"type": "function", **F["function"]}]}
        _, reply = await server.post("/v1/responses", sent)
        (call,) = reply["output"]
        assert (call["arguments"], call["status"]) == (arguments, "incomplete")


@pytest.mark.parametrize(("parser", "text", "arguments"), CASES)
async def test_messages_wrap_the_input(parser: str, text: str, arguments: str) -> None:
    tokenizer = TOKENIZERS[parser]
    async with running(engine_writing(tokenizer, text), tokenizer) as server:
        sent = {
            "messages": MESSAGES,
            "tools": [{"name": "f", "input_schema": F["function"]["parameters"]}],
            "max_tokens": 500,
        }
        _, reply = await server.post("/v1/messages", sent)
        (call,) = reply["content"]
        # The client of a stream derives the same from the beginning of valid JSON.
        begun = {"a": "b"} if arguments == '{"a": "b' else {"INVALID_JSON": arguments}
        assert call["input"] == begun
        events = await server.named_events("/v1/messages", sent)
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(delta["partial_json"] for delta in deltas) == arguments


@pytest.mark.parametrize(("parser", "text", "arguments"), CASES)
async def test_ollamas_api_has_text(parser: str, text: str, arguments: str) -> None:
    tokenizer = TOKENIZERS[parser]
    async with running(engine_writing(tokenizer, text), tokenizer) as server:
        name = server.service.model().name
        sent = {"model": name, "messages": MESSAGES, "tools": [F], "stream": False}
        _, reply = await server.post("/api/chat", sent)
        assert "tool_calls" not in reply["message"]
        assert arguments in reply["message"]["content"]


async def test_calls_of_ollamas_api_are_objects() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"n":\n 1, "s": "a\\nb"}}</tool_call>'
    async with running(engine_writing(JSON, text), JSON) as server:
        name = server.service.model().name
        sent = {"model": name, "messages": MESSAGES, "tools": [F], "stream": False}
        _, reply = await server.post("/api/chat", sent)
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["arguments"] == json.loads('{"n": 1, "s": "a\\nb"}')


async def test_stop_strings_around_what_is_no_call() -> None:
    tokenizer = TOKENIZERS["json_tools"]
    text = "Hello\n<tool_call>no call</tool_call> STOP"
    async with running(engine_writing(tokenizer, text), tokenizer) as server:
        sent = {
            "messages": MESSAGES,
            "tools": [{"name": "f", "input_schema": F["function"]["parameters"]}],
            "max_tokens": 500,
            "stop_sequences": ["\n\n", "STOP"],
        }
        _, reply = await server.post("/v1/messages", sent)
        assert reply["content"] == [{"type": "text", "text": text.removesuffix("STOP")}]
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
