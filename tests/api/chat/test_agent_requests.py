"""Requests as agent frameworks send them, and replies as the frameworks parse them.

The bodies follow those that semantic-kernel, autogen, smolagents, haystack and instructor send. The
model has no native format for calls, and the tags are not tokens in its vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api.api_server import TOKENIZER, chosen, last_prompt, running, tool
from support.api.tool_calls import skip_grammar_check, truncating_engine

PATH = "/v1/chat/completions"
SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "pages": {"type": "integer"}},
    "required": ["query"],
}


def json_call(name: str, **arguments: Any) -> str:
    encoded = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{encoded}\n</tool_call>"


async def test_semantic_kernel_streams_calls_and_sends_their_results() -> None:
    body: dict[str, Any] = {
        "model": "org/tiny",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Find Zürich and Bern."},
        ],
        "tools": [tool("web-search", SEARCH, description="Searches."), tool("time-now")],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tokens": 400,
        "stream_options": {"include_usage": True},
    }
    searches = [json_call("web-search", query=query) for query in ("Zürich", "Bern")]
    text = "\n".join(["Let me see.", *searches])
    async with running(truncating_engine(TOKENIZER, text)) as server:
        skip_grammar_check(server)
        chunks = await server.chunks(PATH, body)
        # The client merges calls by index, so a name and an id must be sent only once.
        calls: dict[int, dict[str, str]] = {}
        content, reasons = "", []
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            content += choice["delta"].get("content") or ""
            reasons.append(choice["finish_reason"])
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id", "")
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"]["arguments"]
        assert (chunks[-1]["choices"], bool(chunks[-1]["usage"])) == ([], True)
        assert content == "Let me see."
        assert [reason for reason in reasons if reason] == ["tool_calls"]
        assert [json.loads(call["arguments"]) for call in calls.values()] == [
            {"query": "Zürich"},
            {"query": "Bern"},
        ]
        assert {call["name"] for call in calls.values()} == {"web-search"}
        past_calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls.values()
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"found {number}"}
            for number, call in calls.items()
        ]
        turn = {"role": "assistant", "content": content, "tool_calls": past_calls}
        await server.chunks(PATH, {**body, "messages": [*body["messages"], turn, *results]})
        prompt = last_prompt(server)
        assert json_call("web-search", query="Bern") in prompt
        assert prompt.index("found 0") < prompt.index("found 1")


@pytest.mark.parametrize("stream", [False, True])
async def test_autogen_requires_a_call_of_a_model_that_repeats_itself(stream: bool) -> None:
    body = {
        "model": "org/tiny",
        "messages": [
            {"role": "system", "content": "Use the tools."},
            {"role": "user", "name": "user", "content": "Search for cats."},
            {"role": "user", "name": "critic", "content": "Go on."},
        ],
        "tools": [tool("search", SEARCH, description="", strict=False)],
        "tool_choice": "required",
    }
    call_text = json_call("search", query="cats", pages=1)
    async with running(truncating_engine(TOKENIZER, "\n".join([call_text] * 20))) as server:
        skip_grammar_check(server)
        if stream:
            chunks = await server.chunks(PATH, body)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert {part["index"] for part in parts} == {0}
            arguments = "".join(part["function"]["arguments"] for part in parts)
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        else:
            _, reply = await server.post(PATH, body)
            (choice,) = reply["choices"]
            (call,) = choice["message"]["tool_calls"]
            arguments = call["function"]["arguments"]
            assert choice["finish_reason"] == "tool_calls"
            # The reply ends at the point where the second call proves to repeat the first.
            assert reply["usage"]["completion_tokens"] < 2 * len(call_text)
        assert json.loads(arguments) == {"query": "cats", "pages": 1}


async def test_smolagents_parses_the_text_if_there_is_no_call() -> None:
    body = {
        "model": "org/tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You call tools."}]},
            {"role": "user", "content": [{"type": "text", "text": "New task: 2 + 2"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Calling tools:\n[...]"}]},
            {"role": "user", "content": [{"type": "text", "text": "Observation:\n4"}]},
        ],
        "tools": [tool("final_answer", SEARCH)],
        "tool_choice": "required",
        "stop": ["Observation:", "Calling tools:"],
    }
    call = json_call("final_answer", query="Observation: 4")
    async with running(truncating_engine(TOKENIZER, call)) as server:
        skip_grammar_check(server)
        for limit in range(1, len(call)):
            status, reply = await server.post(PATH, {**body, "max_tokens": limit})
            assert status == 200
            (choice,) = reply["choices"]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
        _, reply = await server.post(PATH, body)
        (choice,) = reply["choices"]
        # Stop strings do not apply to calls.
        (parsed,) = choice["message"]["tool_calls"]
        assert json.loads(parsed["function"]["arguments"]) == {"query": "Observation: 4"}
        assert choice["message"]["content"] is None


async def test_haystack_gets_complete_calls_or_text() -> None:
    body = {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool("weather", SEARCH, description="The weather.")],
        "n": 1,
        "max_completion_tokens": 1,
    }
    text = f"One moment: {json_call('weather', query='Zürich')}"
    size = len(TOKENIZER.encode(text, add_special_tokens=False)) + 1
    async with running(truncating_engine(TOKENIZER, text)) as server:
        skip_grammar_check(server)
        for limit in range(1, size + 1):
            chunks = await server.chunks(PATH, {**body, "max_completion_tokens": limit})
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            content = "".join(delta.get("content", "") for delta in deltas)
            assert "One moment:".startswith(content.rstrip())
            parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert all(("id" in part) == (number == 0) for number, part in enumerate(parts))
        arguments = "".join(part["function"]["arguments"] for part in parts)
        assert json.loads(arguments) == {"query": "Zürich"}


async def test_instructor_names_a_function_and_gets_one_call() -> None:
    body = {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": "Jason is 25 years old"}],
        "tools": [tool("Person", SEARCH, description="Correctly extracted `Person`", strict=True)],
        "tool_choice": chosen("Person"),
    }
    calls = "\n".join(json_call("Person", query=f"Jason {number}") for number in range(20))
    async with running(truncating_engine(TOKENIZER, calls)) as server:
        skip_grammar_check(server)
        _, reply = await server.post(PATH, body)
        (choice,) = reply["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"query": "Jason 0"}
        assert server.engine.stopped
