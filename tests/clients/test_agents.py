"""Conversations of three agents in the form that they send them.

Codex and Vercel's AI SDK use /v1/responses, Claude Code uses /v1/messages. The model is a scripted
one that calls tools.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from support.api.api_server import Running, running
from support.api.thinking_caller import (
    ANSWER,
    CITIES,
    PARAMETERS,
    TEXT,
    THOUGHT,
    TOKENIZER,
    WEATHER,
    thinking_caller,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(thinking_caller(), TOKENIZER) as server:
        yield server


def prompt(server: Running) -> str:
    return str(TOKENIZER.decode(server.engine.submitted[-1].prompt))


# Codex keeps the conversation itself, stores nothing on the server, and streams.

SHELL = {
    "type": "function",
    "name": "shell_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
CODEX_TOOLS = [
    SHELL,
    {"type": "function", "name": WEATHER, "strict": False, "parameters": PARAMETERS},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    },
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "", "parameters": {}},
    {"type": "namespace", "name": "mcp__notes", "description": "", "tools": [SHELL]},
]


def codex(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "org/tiny",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "client_metadata": {"x-codex-installation-id": "i"},
    }


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


async def codex_turn(server: Running, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs a turn; returns its output items in the form in which Codex sends them back."""
    events = await server.named_events(RESPONSES, codex(copy.deepcopy(items)))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    completed = events[-1]["response"]
    assert completed["usage"]["total_tokens"] > 0
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == completed["output"]
    for item in done:
        # Codex drops ids, and keeps reasoning only in encrypted form.
        del item["id"], item["status"]
        if item["type"] == "reasoning":
            item |= {"summary": [], "content": None}
    return done


async def test_codex_through_several_turns(server: Running) -> None:
    items = [
        said("developer", "<permissions instructions>"),
        said("user", "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"),
        said("user", "What is the weather?"),
    ]
    first = await codex_turn(server, items)
    assert [item["type"] for item in first] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    shown = prompt(server)
    assert "shell_command" in shown
    for left_out in ("apply_patch", "web_search", "mcp__notes", "local_shell"):
        assert left_out not in shown
    calls = [item for item in first if item["type"] == "function_call"]
    assert [json.loads(call["arguments"])["city"] for call in calls] == list(CITIES)
    results = [
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": calls[1]["call_id"],
            "output": [{"type": "input_text", "text": "cloudy"}],
        },
    ]
    items += [*first, *results]
    second = await codex_turn(server, items)
    assert second[-1]["content"][0]["text"] == ANSWER
    assert f"{TEXT}<tool_call>" in prompt(server)
    # Items of a conversation that another server began, with tools that we do not run.
    items += [
        *second,
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "Done!"},
        {
            "type": "local_shell_call",
            "call_id": "l",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "timeout_ms": 5},
        },
        {"type": "function_call_output", "call_id": "l", "output": "a.txt"},
        said("user", "And now?"),
    ]
    third = await codex_turn(server, items)
    assert third[-1]["content"][0]["text"] == ANSWER
    for shown in ("*** Begin", "Done!", '"ls"', "a.txt", "And now?"):
        assert shown in prompt(server)
    # The conversation is compacted and continues.
    _, compacted = await server.post(
        f"{RESPONSES}/compact",
        {key: codex(items)[key] for key in ("model", "instructions", "input", "tools")},
    )
    assert compacted["output"][-1]["type"] == "compaction"
    await codex_turn(server, [*compacted["output"], said("user", "Go on")])
    assert "Summary of the conversation so far:" in prompt(server)


# Vercel's AI SDK stores responses and refers to stored items by their ids.


def ai_sdk(items: list[dict[str, Any]]) -> dict[str, Any]:
    tool = {"type": "function", "name": WEATHER, "parameters": PARAMETERS, "strict": False}
    return {
        "model": "org/tiny",
        "input": items,
        "tools": [tool, {"type": "web_search", "search_context_size": "high"}],
        "tool_choice": "auto",
        "include": ["web_search_call.action.sources"],
        "reasoning": {"summary": "auto"},
        "stream": True,
    }


async def ai_sdk_turn(server: Running, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    events = await server.named_events(RESPONSES, ai_sdk(items))
    open_items: dict[int, str] = {}
    for event in events:
        # The SDK follows items by their index, and text by the item's id.
        if event["type"] == "response.output_item.added":
            open_items[event["output_index"]] = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert open_items.pop(event["output_index"]) == event["item"]["id"]
        elif "item_id" in event:
            assert open_items[event["output_index"]] == event["item_id"]
    assert not open_items
    assert events[-1]["type"] == "response.completed"
    output: list[dict[str, Any]] = events[-1]["response"]["output"]
    return output


def references(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in output]


async def test_the_ai_sdk_through_several_turns(server: Running) -> None:
    items: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ]
    first = await ai_sdk_turn(server, items)
    calls = [item for item in first if item["type"] == "function_call"]
    assert len(calls) == 2
    items += references(first)
    items += [
        {"type": "function_call_output", "call_id": call["call_id"], "output": '"sunny"'}
        for call in calls
    ]
    second = await ai_sdk_turn(server, items)
    assert second[-1]["content"][0]["text"] == ANSWER
    by_reference = server.engine.submitted[-1].prompt
    # Sending the items themselves leads to the same prompt.
    full = [*items[:2], *first, *items[2 + len(first) :]]
    await ai_sdk_turn(server, full)
    assert server.engine.submitted[-1].prompt == by_reference
    for number in range(6):
        items += [*references(second), {"role": "user", "content": f"And {number}?"}]
        second = await ai_sdk_turn(server, items)
    shown = prompt(server)
    assert shown.count(ANSWER) == 6
    assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in shown
    # An unknown reference is an error in OpenAI's words, which clients know.
    status, reply = await server.post(
        RESPONSES, {"input": [{"type": "item_reference", "id": "msg_gone"}]}
    )
    assert (status, reply["error"]["message"]) == (404, "Item with id 'msg_gone' not found.")


# Claude Code sends betas, marks blocks for caching, and streams.

CACHED = {"type": "ephemeral", "ttl": "1h"}


def claude_code(messages: list[Any]) -> dict[str, Any]:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **PARAMETERS}
    return {
        "model": "org/tiny",
        "messages": messages,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "Be brief.", "cache_control": CACHED},
        ],
        "tools": [
            {
                "name": WEATHER,
                "description": "Tells the weather.",
                "input_schema": {**schema, "additionalProperties": False},
                "eager_input_streaming": True,
                "cache_control": CACHED,
            }
        ],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "diagnostics": {"previous_message_id": None},
    }


async def test_claude_code_through_several_turns(server: Running) -> None:
    betas = [
        *("claude-code-20250219", "interleaved-thinking-2025-05-14"),
        *("context-management-2025-06-27", "prompt-caching-scope-2026-01-05"),
    ]
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="-", max_retries=0, _strict_response_validation=True
    ) as client:
        reminder = {"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>"}
        asked = {"type": "text", "text": "Weather?", "cache_control": CACHED}
        messages: list[Any] = [{"role": "user", "content": [reminder, asked]}]
        # At /v1/messages?beta=true.
        async with client.beta.messages.stream(**claude_code(messages), betas=betas) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        thought, text, *calls = first.content
        assert (thought.thinking, text.text) == (THOUGHT, TEXT)
        assert [call.input for call in calls] == [{"city": city} for city in CITIES]
        messages += [
            {
                "role": "assistant",
                "content": [b.model_dump(exclude_none=True) for b in first.content],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": calls[0].id,
                        "content": [{"type": "text", "text": "sunny"}],
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": calls[1].id,
                        "content": "<tool_use_error>no such city</tool_use_error>",
                        "is_error": True,
                        "cache_control": CACHED,
                    },
                    {"type": "text", "text": "<system-reminder>Go on</system-reminder>"},
                ],
            },
        ]
        second_body = claude_code(messages)
        second_body["diagnostics"] = {"previous_message_id": first.id}
        async with client.beta.messages.stream(**second_body, betas=betas) as stream:
            second = await stream.get_final_message()
        assert (second.content[-1].text, second.stop_reason) == (ANSWER, "end_turn")
        shown = prompt(server)
        assert f"<think>{THOUGHT}</think>{TEXT}<tool_call>" in shown
        assert "tool\nError: <tool_use_error>" in shown
        counted = {key: second_body[key] for key in ("model", "messages", "system", "tools")}
        count = await client.beta.messages.count_tokens(**counted, thinking={"type": "adaptive"})
        used = second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
        assert count.input_tokens == used
        # Its web search is a separate request; the refusal names the tool.
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
            await client.beta.messages.create(
                model="org/tiny", max_tokens=9, messages=messages[:1], tools=[search]
            )
        # Claude Code compacts when it gets this error.
        long = [{"role": "user", "content": "x" * 5000}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d"):
            async with client.beta.messages.stream(**claude_code(long), betas=betas) as stream:
                await stream.get_final_message()
        # It requests titles with a schema.
        schema = {"type": "object", "properties": {"title": {"type": "string"}}}
        await client.beta.messages.create(
            model="org/tiny",
            max_tokens=9,
            messages=messages[:1],
            extra_body={"output_format": {"type": "json_schema", "schema": schema}},
            betas=["structured-outputs-2025-11-13"],
        )
        grammar = server.engine.submitted[-1].params.grammar
        assert grammar is not None
        assert json.loads(grammar.text)["properties"] == schema["properties"]
