"""The items of /v1/responses: references to stored ones, other servers' tools, compaction."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import TOKENIZER, Running, ending, running, until
from support.api.fake_engine import FakeEngine, model_info

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, digest_of
from chairlift.api.errors import UnknownItem
from chairlift.api.responses.compaction import opened, sealed
from chairlift.api.responses.store import ENTRY_BYTES, ITEM_BYTES, ResponseStore, StoredResponse

PATH = "/v1/responses"
KEYS = tuple(ApiKey(name, digest_of(f"sk-{name}-secret"), NO_LIMITS) for name in ("alice", "bob"))
ALICE, BOB = ({"Authorization": f"Bearer sk-{name}-secret"} for name in ("alice", "bob"))
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hello"))) as server:
        yield server


def prompt(server: Running) -> str:
    return str(TOKENIZER.decode(server.engine.submitted[-1].prompt))


def turns(*said: tuple[str, str]) -> str:
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    return f"{told}<|im_start|>assistant\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def reference(item_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id, **fields}


# References to stored items


async def test_a_reference_stands_for_the_stored_item(server: Running) -> None:
    _, first = await server.post(PATH, {"input": [user("one")]})
    [said] = first["output"]
    for given_type in ("item_reference", None, "-"):
        pointer = reference(said["id"], type=given_type)
        if given_type == "-":
            del pointer["type"]
        status, second = await server.post(PATH, {"input": [user("one"), pointer, user("two")]})
        assert status == 200, second
        assert prompt(server) == turns(("user", "one"), ("assistant", "Hello"), ("user", "two"))
    # Inputs can be referred to, too, by the ids that they were given here.
    _, items = await server.get(f"{PATH}/{second['id']}/input_items?order=asc")
    pointers = [reference(item["id"]) for item in items["data"]]
    _, third = await server.post(PATH, {"input": [*pointers, user("three")]})
    said = [("user", "one"), ("assistant", "Hello"), ("user", "two"), ("user", "three")]
    assert prompt(server) == turns(*said)
    # What a later response holds outlives the earlier one.
    for gone in (first, second):
        async with server.http.delete(f"{server.url}{PATH}/{gone['id']}") as response:
            assert response.status == 200
    status, _ = await server.post(PATH, {"input": pointers})
    assert status == 200
    async with server.http.delete(f"{server.url}{PATH}/{third['id']}") as response:
        assert response.status == 200
    pointer = pointers[0]["id"]
    for stored in list(server.response_store._shelves["anonymous"].entries):
        await server.http.delete(f"{server.url}{PATH}/{stored}")
    status, reply = await server.post(PATH, {"input": pointers})
    assert (status, reply["error"]) == (
        404,
        {
            "message": f"Item with id '{pointer}' not found.",
            "type": "invalid_request_error",
            "param": "input",
            "code": None,
        },
    )


async def test_a_reference_reaches_no_other_key_and_no_client_made_id() -> None:
    engine = FakeEngine(model_info(), ending("Hello"))
    async with running(engine, keys=KEYS) as server:
        _, mine = await server.post(PATH, {"input": [{**user("secret"), "id": "msg_1"}]}, **ALICE)
        pointer = reference(mine["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}, **BOB))[0] == 404
        assert (await server.post(PATH, {"input": [pointer]}, **ALICE))[0] == 200
        # Any client could have called something of its own so.
        assert (await server.post(PATH, {"input": [reference("msg_1")]}, **ALICE))[0] == 404
        _, kept = await server.post(PATH, {"input": "x", "store": False}, **ALICE)
        pointer = reference(kept["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}, **ALICE))[0] == 404
        many = {"input": [reference(mine["output"][0]["id"])] * 4096}
        assert (await server.post(PATH, many, **ALICE))[0] == 400  # too long a prompt
        more = {"input": [user("x"), *many["input"]]}
        assert (await server.post(PATH, more, **ALICE))[0] == 400


async def test_references_end_with_what_is_stored() -> None:
    engine = FakeEngine(model_info(), ending("Hello"))
    async with running(engine, response_store_seconds=0.2) as server:
        _, reply = await server.post(PATH, {"input": "Hi"})
        await until(lambda: not len(server.response_store))
        pointer = reference(reply["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}))[0] == 404
        assert not server.response_store._shelves["anonymous"].responses_by_item


@given(st.integers(0, 2**32))
def test_the_store_finds_exactly_what_it_holds(seed: int) -> None:
    """Responses that share items come and go, by room and by request; the newest is found."""
    rng = random.Random(seed)

    async def play() -> None:
        store = ResponseStore(8 * (ENTRY_BYTES + 4 * ITEM_BYTES), 60)
        alive: dict[str, list[tuple[str, tuple[str, ...]]]] = {"a": [], "b": []}
        for number in range(40):
            owner = rng.choice("ab")
            if alive[owner] and rng.random() < 0.3:
                response_id, items = rng.choice(alive[owner])
                store.delete(owner, response_id)
            else:
                items = tuple(sorted({f"i{rng.randrange(8)}" for _ in range(rng.randrange(5))}))
                store.put(owner, StoredResponse(f"r{number}", b"{}", b"[]", items))
                alive[owner].append((f"r{number}", items))
            for name, responses in alive.items():
                shelf = store._shelves.get(name)
                kept = set() if shelf is None else set(shelf.entries)
                alive[name] = [one for one in responses if one[0] in kept]
                for item in (f"i{n}" for n in range(8)):
                    holders = [one for one, held in alive[name] if item in held]
                    if holders:
                        assert [s.id for s in store.containing(name, [item])] == [holders[-1]]
                    else:
                        with pytest.raises(UnknownItem):
                            store.containing(name, [item])
            assert store.size <= store.max_bytes

    asyncio.run(play())


# Tools that are not run


async def test_tools_that_are_not_run_are_left_out_with_a_line_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    others = [
        {"type": "web_search", "external_web_access": True},
        {"type": "custom", "name": "apply_patch", "description": "secret text"},
        {"type": "brand_new_type_of_tool", "container": "x", "background": True},
    ]
    with caplog.at_level(logging.INFO):
        status, reply = await server.post(PATH, {"input": "Hi", "tools": [*others, WEATHER]})
        assert status == 200
        assert [tool["name"] for tool in reply["tools"]] == ["weather"]
        lines = [record.getMessage() for record in caplog.records if "left out" in record.message]
        types = "web_search, custom, brand_new_type_of_tool"
        assert lines == [f"left out tools of types that are not run: {types}"]
    with_weather = prompt(server)
    await server.post(PATH, {"input": "Hi", "tools": [WEATHER]})
    assert prompt(server) == with_weather
    assert (await server.post(PATH, {"input": "Hi", "tools": others}))[0] == 200
    for choice in ("auto", "none"):
        body = {"input": "Hi", "tools": others, "tool_choice": choice}
        assert (await server.post(PATH, body))[0] == 200
    before = len(server.engine.submitted)
    body = {"input": "Hi", "tools": others, "tool_choice": "required"}
    status, reply = await server.post(PATH, body)
    assert (status, reply["error"]["param"]) == (400, "tool_choice")
    assert types in reply["error"]["message"]
    for choice in ({"type": "web_search"}, {"type": "custom", "name": "apply_patch"}):
        body = {"input": "Hi", "tools": [*others, WEATHER], "tool_choice": choice}
        status, reply = await server.post(PATH, body)
        assert (status, reply["error"]["param"]) == (400, "tool_choice")
        assert choice.get("name", choice["type"]) in reply["error"]["message"]
    assert len(server.engine.submitted) == before
    body = {"input": "Hi", "tools": [*others, WEATHER], "tool_choice": "required"}
    assert (await server.post(PATH, body))[0] == 200


async def test_allowed_tools_are_those_that_are_shown(server: Running) -> None:
    tools = [WEATHER, {**WEATHER, "name": "news"}]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "news"}, {"type": "image_generation"}],
    }
    body = {"input": "Hi", "tools": tools, "tool_choice": allowed}
    status, reply = await server.post(PATH, body)
    assert (status, reply["tool_choice"]) == (200, allowed)
    assert "weather" not in prompt(server)
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    assert "news" in grammar.text
    assert "weather" not in grammar.text


# Items of other servers' tools


async def test_what_other_servers_tools_did_is_shown_as_calls(server: Running) -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin\n"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patched"},
        {"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "error": "no door"},
        {
            "type": "local_shell_call",
            "call_id": "s",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}},
        },
        {"type": "local_shell_call_output", "call_id": "s", "output": "a.txt"},
        {"type": "web_search_call", "status": "completed", "action": {"query": "snow"}},
    ]
    status, reply = await server.post(PATH, {"input": [user("Hi"), *items]})
    assert status == 200
    text = prompt(server)
    for shown in ("patch", "*** Begin", "patched", "look", "no door", "ls", "a.txt", "snow"):
        assert shown in text, shown
    _, stored = await server.get(f"{PATH}/{reply['id']}/input_items?order=asc")
    calls = [item for item in stored["data"] if item["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["patch", "look", "local_shell", "web_search"]
    assert json.loads(calls[0]["arguments"]) == {"input": "*** Begin\n"}
    outputs = [item for item in stored["data"] if item["type"] == "function_call_output"]
    assert [output["call_id"] for output in outputs] == [call["call_id"] for call in calls]
    status, reply = await server.post(
        PATH, {"input": [{"type": "local_shell_call_output", "output": "x"}]}
    )
    assert (status, "id or call_id" in reply["error"]["message"]) == (400, True)


async def test_a_refusal_is_said_again(server: Running) -> None:
    refusal = {"type": "refusal", "refusal": "I cannot."}
    items = [user("a"), {"role": "assistant", "content": [refusal]}, user("b")]
    status, reply = await server.post(PATH, {"input": items})
    said = turns(("user", "a"), ("assistant", "I cannot."), ("user", "b"))
    assert (status, prompt(server)) == (200, said)
    _, stored = await server.get(f"{PATH}/{reply['id']}/input_items?order=asc")
    assert stored["data"][1]["content"] == [refusal]
    # Stored, it leads to the same prompt.
    await server.post(PATH, {"input": "c", "previous_response_id": reply["id"]})
    assert "assistant\nI cannot.<|im_end|>" in prompt(server)


# Counting and compacting


async def test_input_tokens_are_those_of_the_prompt(server: Running) -> None:
    _, first = await server.post(PATH, {"input": "one"})
    asked = {
        "input": [user("two"), reference(first["output"][0]["id"]), user("three")],
        "previous_response_id": first["id"],
        "instructions": "Be brief",
        "tools": [WEATHER, {"type": "web_search"}],
        "reasoning": {"effort": "low"},
    }
    _, reply = await server.post(PATH, asked)
    status, count = await server.post(f"{PATH}/input_tokens", asked)
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
        status, body = await server.post(f"{PATH}/input_tokens", {"input": "x", **change})
        assert (status, body["error"]["param"]) == (400, param)


async def test_a_conversation_is_compacted_and_gone_on_from(server: Running) -> None:
    server.engine.script = ending("They met in Bern.")
    first = await server.openai.responses.create(model="org/tiny", input="Where did they meet?")
    # As OpenAI's: what users said comes back, which its client's own type leaves out.
    body = {
        "instructions": "Be brief",
        "input": [{"role": "developer", "content": "Speak French"}],
        "previous_response_id": first.id,
        "tools": [WEATHER],
        "parallel_tool_calls": True,
    }
    status, compacted = await server.post(f"{PATH}/compact", body)
    asked = prompt(server)
    for said in ("Be brief", "Where did they meet?", "They met in Bern.", "Summarize"):
        assert said in asked
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
    assert "Summary of the conversation so far:\nThey met in Bern." in prompt(server)
    # It is stored, and led on from, like any item.
    await server.openai.responses.create(
        model="org/tiny", input="And then?", previous_response_id=reply.id
    )
    assert "They met in Bern." in prompt(server)
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
def test_what_was_not_sealed_here_is_refused(text: str) -> None:
    for foreign in (text, f"gAAAA{text}", f"{sealed('')}{text}!"):
        with pytest.raises(ValueError, match="not a compaction"):
            opened(foreign)
