"""Counting and compacting a conversation at /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import Running, ending, engine_replying, last_prompt, running

from chairlift.api.responses.compaction import opened, sealed

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def reference(item_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id, **fields}


async def test_input_tokens_counts_the_prompt(server: Running) -> None:
    _, first = await server.post(PATH, {"input": "one"})
    body = {
        "input": [user("two"), reference(first["output"][0]["id"]), user("three")],
        "previous_response_id": first["id"],
        "instructions": "Be brief",
        "tools": [WEATHER, {"type": "web_search"}],
        "reasoning": {"effort": "low"},
    }
    _, reply = await server.post(PATH, body)
    status, count = await server.post(f"{PATH}/input_tokens", body)
    tokens = reply["usage"]["input_tokens"]
    assert (status, count) == (200, {"object": "response.input_tokens", "input_tokens": tokens})
    assert len(server.engine.submitted) == 2
    counted = await server.openai.responses.input_tokens.count(model="org/tiny", input="one")
    assert counted.input_tokens == first["usage"]["input_tokens"]
    for change, param in (
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"personality": "friendly"}, "personality"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ):
        status, error = await server.post(f"{PATH}/input_tokens", {"input": "x", **change})
        assert (status, error["error"]["param"]) == (400, param)


async def test_a_compacted_conversation_can_be_continued(server: Running) -> None:
    server.engine.script = ending("They met in Bern.")
    first = await server.openai.responses.create(model="org/tiny", input="Where did they meet?")
    # As OpenAI's server does, the reply returns the users' messages, though its client's type
    # leaves them out.
    body = {
        "instructions": "Be brief",
        "input": [{"role": "developer", "content": "Speak French"}],
        "previous_response_id": first.id,
        "tools": [WEATHER],
        "parallel_tool_calls": True,
    }
    status, compacted = await server.post(f"{PATH}/compact", body)
    asked = last_prompt(server)
    for text in ("Be brief", "Where did they meet?", "They met in Bern.", "Summarize"):
        assert text in asked
    assert (status, compacted["object"]) == (200, "response.compaction")
    *kept, summary = compacted["output"]
    assert [(item["role"], item["content"][0]["text"]) for item in kept] == [
        ("user", "Where did they meet?"),
        ("developer", "Speak French"),
    ]
    assert summary["type"] == "compaction"
    assert compacted["usage"]["input_tokens"] == len(server.engine.submitted[-1].prompt)
    by_client = await server.openai.responses.compact(
        model="org/tiny", input=[{"role": "assistant", "content": "They met in Bern."}]
    )
    assert [item.type for item in by_client.output] == ["compaction"]
    reply = await server.openai.responses.create(
        model="org/tiny", input=[*kept, summary, user("And then?")]
    )
    assert "Summary of the conversation so far:\nThey met in Bern." in last_prompt(server)
    # A stored summary continues the conversation like any item.
    await server.openai.responses.create(
        model="org/tiny", input="And then?", previous_response_id=reply.id
    )
    assert "They met in Bern." in last_prompt(server)
    server.engine.script = ending(" \n")
    with pytest.raises(openai.InternalServerError, match="no summary"):
        await server.openai.responses.compact(model="org/tiny", input="Hi")
    with pytest.raises(openai.BadRequestError) as missing:
        await server.openai.responses.compact(model="org/tiny", previous_response_id="resp_x")
    assert missing.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await server.openai.responses.compact(model="org/tiny", input="x" * 100_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")


@given(st.text())
def test_a_summary_survives_its_sealing(summary: str) -> None:
    try:
        summary.encode()
    except UnicodeEncodeError:
        return
    assert opened(sealed(summary)) == summary


@given(st.text())
def test_a_summary_that_was_not_sealed_here_is_refused(text: str) -> None:
    for foreign in (text, f"gAAAA{text}", f"{sealed('')}{text}!"):
        with pytest.raises(ValueError, match="not a compaction"):
            opened(foreign)
