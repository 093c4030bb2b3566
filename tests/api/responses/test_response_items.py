"""Items of /v1/responses: references to stored items, and tools that other servers run."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import (
    Running,
    engine_replying,
    last_prompt,
    running,
    until,
)
from support.api.credentials import ALICE, BOB, alice_and_bob, bearer

from chairlift.api.errors import UnknownItem, UnknownResponse
from chairlift.api.responses.history import messages_of
from chairlift.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from chairlift.api.responses.replies import ENTRY_BYTES, ITEM_BYTES, StoredResponse
from chairlift.api.responses.store import ResponseStore

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


def prompt_of(*turns: tuple[str, str]) -> str:
    """The prompt of a conversation, given as roles and texts."""
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{text}<|im_start|>assistant\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def reference(item_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id, **fields}


async def test_a_reference_is_replaced_by_the_stored_item(server: Running) -> None:
    _, first = await server.post(PATH, {"input": [user("one")]})
    [message] = first["output"]
    ids = []
    for given_type in ("item_reference", None, "-"):
        pointer = reference(message["id"], type=given_type)
        if given_type == "-":
            del pointer["type"]
        status, second = await server.post(PATH, {"input": [user("one"), pointer, user("two")]})
        assert status == 200, second
        turns = [("user", "one"), ("assistant", "Hello"), ("user", "two")]
        assert last_prompt(server) == prompt_of(*turns)
        ids.append(second["id"])
    # Inputs can be referred to, too, by the ids that the server gave them.
    _, items = await server.get(f"{PATH}/{second['id']}/input_items?order=asc")
    pointers = [reference(item["id"]) for item in items["data"]]
    _, third = await server.post(PATH, {"input": [*pointers, user("three")]})
    assert last_prompt(server) == prompt_of(*turns, ("user", "three"))

    async def delete(response_id: str) -> None:
        async with server.http.delete(f"{server.url}{PATH}/{response_id}") as response:
            assert response.status == 200

    # An item that a later response contains outlives the earlier response.
    for response_id in (first["id"], second["id"]):
        await delete(response_id)
    status, fourth = await server.post(PATH, {"input": pointers})
    assert status == 200
    for response_id in {*ids, third["id"], fourth["id"]} - {second["id"]}:
        await delete(response_id)
    assert len(server.response_store) == 0
    pointer = pointers[0]["id"]
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


async def test_a_reference_finds_no_item_of_another_key_and_no_id_of_a_client() -> None:
    engine = engine_replying("Hello")
    async with running(engine, keys=alice_and_bob()) as server:
        _, mine = await server.post(
            PATH, {"input": [{**user("secret"), "id": "msg_1"}]}, **bearer(ALICE)
        )
        pointer = reference(mine["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}, **bearer(BOB)))[0] == 404
        assert (await server.post(PATH, {"input": [pointer]}, **bearer(ALICE)))[0] == 200
        # Clients choose such ids freely, so they identify nothing.
        assert (await server.post(PATH, {"input": [reference("msg_1")]}, **bearer(ALICE)))[0] == 404
        _, unstored = await server.post(PATH, {"input": "x", "store": False}, **bearer(ALICE))
        pointer = reference(unstored["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}, **bearer(ALICE)))[0] == 404
        many = {"input": [reference(mine["output"][0]["id"])] * 4096}
        assert (await server.post(PATH, many, **bearer(ALICE)))[0] == 400  # too long a prompt
        more = {"input": [user("x"), *many["input"]]}
        assert (await server.post(PATH, more, **bearer(ALICE)))[0] == 400


async def test_a_reference_to_an_expired_response_is_a_404() -> None:
    engine = engine_replying("Hello")
    async with running(engine, response_store_seconds=0.2) as server:
        _, reply = await server.post(PATH, {"input": "Hi"})
        await until(lambda: not len(server.response_store))
        pointer = reference(reply["output"][0]["id"])
        assert (await server.post(PATH, {"input": [pointer]}))[0] == 404
        assert server.response_store.size == 0


def is_stored(store: ResponseStore, owner: str, response_id: str) -> bool:
    try:
        return store.get(owner, response_id).id == response_id
    except UnknownResponse:
        return False


@given(st.integers(0, 2**32))
def test_the_store_finds_exactly_what_it_holds(seed: int) -> None:
    """A reference finds the newest of the responses that contain the item.

    Responses that share items are added, deleted, and dropped for lack of room.
    """
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
                alive[name] = [one for one in responses if is_stored(store, name, one[0])]
                for item in (f"i{n}" for n in range(8)):
                    holders = [one for one, contained in alive[name] if item in contained]
                    if holders:
                        assert [s.id for s in store.containing(name, [item])] == [holders[-1]]
                    else:
                        with pytest.raises(UnknownItem):
                            store.containing(name, [item])
            assert store.size <= store.max_bytes

    asyncio.run(play())


async def test_unsupported_tools_are_left_out_and_logged(
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
    with_weather = last_prompt(server)
    await server.post(PATH, {"input": "Hi", "tools": [WEATHER]})
    assert last_prompt(server) == with_weather
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


async def test_only_allowed_tools_are_shown_to_the_model(server: Running) -> None:
    tools = [WEATHER, {**WEATHER, "name": "news"}]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "news"}, {"type": "image_generation"}],
    }
    body = {"input": "Hi", "tools": tools, "tool_choice": allowed}
    status, reply = await server.post(PATH, body)
    assert (status, reply["tool_choice"]) == (200, allowed)
    assert "weather" not in last_prompt(server)
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    assert "news" in grammar.text
    assert "weather" not in grammar.text


async def test_calls_that_other_servers_ran_are_shown_as_function_calls(server: Running) -> None:
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
    text = last_prompt(server)
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


async def test_a_refusal_is_part_of_the_conversation(server: Running) -> None:
    refusal = {"type": "refusal", "refusal": "I cannot."}
    items = [user("a"), {"role": "assistant", "content": [refusal]}, user("b")]
    status, reply = await server.post(PATH, {"input": items})
    expected = prompt_of(("user", "a"), ("assistant", "I cannot."), ("user", "b"))
    assert (status, last_prompt(server)) == (200, expected)
    _, stored = await server.get(f"{PATH}/{reply['id']}/input_items?order=asc")
    assert stored["data"][1]["content"] == [refusal]
    # The stored refusal gives the same prompt.
    await server.post(PATH, {"input": "c", "previous_response_id": reply["id"]})
    assert "assistant\nI cannot.<|im_end|>" in last_prompt(server)


def _call(call_id: str) -> FunctionCallItem:
    return FunctionCallItem(f"fc_{call_id}", call_id, "look", "{}")


def _text(text: str) -> MessageItem:
    return MessageItem("msg_1", "assistant", [OutputText(text)])


def _thought(text: str) -> ReasoningItem:
    return ReasoningItem("rs_1", [ReasoningText(text)])


def _summary(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [call["id"] for call in message.get("tool_calls", ())]
    return message["role"], message.get("reasoning_content"), message.get("content"), calls


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ([_call("a"), _text("And"), _call("b")], [(None, "And", ["a", "b"])]),
        ([_text("One"), _call("a"), _text(", two"), _call("b")], [(None, "One, two", ["a", "b"])]),
        (
            [_thought("Hm."), _call("a"), _thought(" Oh."), _call("b")],
            [("Hm. Oh.", None, ["a", "b"])],
        ),
        ([_thought("Hm."), _thought(" Oh."), _call("a")], [("Hm. Oh.", None, ["a"])]),
        (
            [_text("One"), _thought("Hm."), _call("a")],
            [(None, "One", []), ("Hm.", None, ["a"])],
        ),
    ],
)
def test_results_follow_the_one_message_of_all_calls(
    turn: list[Item], expected: list[tuple[Any, ...]]
) -> None:
    calls = [item.call_id for item in turn if isinstance(item, FunctionCallItem)]
    results = [FunctionCallOutputItem(f"fco_{call}", call, "snow") for call in calls]
    messages = messages_of(None, [*turn, *results, _text("Done"), _text("Bye")])
    assert [_summary(message) for message in messages] == [
        *(("assistant", *one) for one in expected),
        *(("tool", None, "snow", []) for _ in calls),
        ("assistant", None, "Done", []),
        ("assistant", None, "Bye", []),
    ]
