"""/v1/responses over HTTP: events of a stream, conversations, stored responses, refusals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import (
    Running,
    ending,
    engine_replying,
    ids,
    last_prompt,
    running,
    until,
)
from support.api.credentials import ALICE, BOB, alice_and_bob, bearer
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.errors import UnknownResponse
from chairlift.api.responses.replies import ENTRY_BYTES, StoredResponse
from chairlift.api.responses.store import ResponseStore

PATH = "/v1/responses"


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


# Streams


async def test_the_events_of_a_text_in_their_order(server: Running) -> None:
    events = await server.named_events(PATH, {"input": "Hi", "metadata": {"a": "b"}})
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 5,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, _, added, part, *deltas = events[:9]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert added["item"]["content"] == []
    assert part["part"]["text"] == ""
    assert "".join(event["delta"] for event in deltas) == "Hello"
    assert {event["item_id"] for event in events[3:11]} == {added["item"]["id"]}
    text, _, item, completed = events[-4:]
    response = completed["response"]
    assert text["text"] == item["item"]["content"][0]["text"] == "Hello"
    assert response["output"] == [item["item"]]
    assert (response["status"], response["metadata"]) == ("completed", {"a": "b"})
    assert response["usage"]["output_tokens"] == 6
    assert (await server.get(f"{PATH}/{response['id']}"))[1] == response


async def test_a_reply_cut_by_max_output_tokens_is_incomplete() -> None:
    engine = FakeEngine(model_info(), lambda request, index: Scripted(ids("Hel"), "length"))
    async with running(engine) as server:
        *_, done, last = await server.named_events(PATH, {"input": "Hi", "max_output_tokens": 3})
        assert engine.submitted[0].params.max_tokens == 3
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert done["item"]["status"] == last["response"]["output"][0]["status"] == "incomplete"


async def test_a_failed_stream_ends_with_an_error_and_is_not_stored() -> None:
    dying = FakeEngine(
        model_info(), lambda request, index: Scripted(ids("ab"), "error", error="it broke")
    )
    async with running(dying) as server:
        *_, delta, error, failed = await server.named_events(PATH, {"input": "Hi"})
        assert delta["delta"] == "a"
        assert (error["type"], error["code"]) == ("error", "generation_failed")
        response = failed["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert (await server.get(f"{PATH}/{response['id']}"))[0] == 404
        dying.script = lambda request, index: Scripted([], "error", error="at once")
        events = await server.named_events(PATH, {"input": "Hi"})
        assert [event["type"] for event in events] == [
            *("response.created", "response.in_progress", "error", "response.failed")
        ]


async def test_a_reply_without_text_is_an_empty_message() -> None:
    async with running(FakeEngine(model_info(), ending(""))) as server:
        _, reply = await server.post(PATH, {"input": "Hi"})
        assert [part["text"] for part in reply["output"][0]["content"]] == [""]
        assert reply["status"] == "completed"


# The conversation


async def test_items_become_the_prompt(server: Running) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "developer", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    status, _ = await server.post(PATH, {"input": items, "instructions": "Be brief"})
    assert status == 200
    said = [("system", "Be brief"), ("user", "a"), ("assistant", "b"), ("system", "c")]
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert last_prompt(server) == f"{turns}<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"


async def test_a_chain_of_responses_keeps_all_but_the_instructions(server: Running) -> None:
    first = (await server.post(PATH, {"input": "one", "instructions": "Be brief"}))[1]["id"]
    second = (await server.post(PATH, {"input": "two", "previous_response_id": first}))[1]
    assert second["previous_response_id"] == first
    # The later response keeps the conversation.
    async with server.http.delete(f"{server.url}{PATH}/{first}") as response:
        assert await response.json() == {
            "id": first,
            "object": "response.deleted",
            "deleted": True,
        }
    await server.post(PATH, {"input": "three", "previous_response_id": second["id"]})
    said = [("user", "one"), ("assistant", "Hello"), ("user", "two"), ("assistant", "Hello")]
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert (
        last_prompt(server) == f"{turns}<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    _, items = await server.get(f"{PATH}/{second['id']}/input_items?order=asc&limit=2")
    assert [item["content"][0]["text"] for item in items["data"]] == ["one", "Hello"]
    assert (items["has_more"], items["first_id"]) == (True, items["data"][0]["id"])
    _, rest = await server.get(
        f"{PATH}/{second['id']}/input_items?order=asc&after={items['last_id']}"
    )
    assert [item["content"][0]["text"] for item in rest["data"]] == ["two"]
    assert not rest["has_more"]
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        status, _ = await server.get(f"{PATH}/{second['id']}/input_items?{query}")
        assert status == 400


# Stored responses


async def test_a_response_belongs_to_the_key_that_made_it() -> None:
    engine = engine_replying("Hello")
    async with running(engine, keys=alice_and_bob()) as server:
        _, mine = await server.post(PATH, {"input": "Hi"}, **bearer(ALICE))
        stored = f"{server.url}{PATH}/{mine['id']}"
        for method, path in (
            ("GET", stored),
            ("GET", f"{stored}/input_items"),
            ("POST", f"{stored}/cancel"),
            ("DELETE", stored),
        ):
            async with server.http.request(method, path, headers=bearer(BOB)) as response:
                assert response.status == 404, path
                assert (await response.json())["error"]["code"] == "response_not_found"
        body = {"input": "Hi", "previous_response_id": mine["id"]}
        status, reply = await server.post(PATH, body, **bearer(BOB))
        assert (status, reply["error"]["param"]) == (400, "previous_response_id")
        assert (await server.post(PATH, body, **bearer(ALICE)))[0] == 200
        async with server.http.post(f"{stored}/cancel", headers=bearer(ALICE)) as response:
            assert response.status == 400
        async with server.http.get(f"{stored}?stream=true", headers=bearer(ALICE)) as response:
            assert response.status == 400
        assert len(engine.submitted) == 2


async def test_store_false_stores_nothing(server: Running) -> None:
    _, reply = await server.post(PATH, {"input": "Hi", "store": False})
    assert reply["store"] is False
    assert (await server.get(f"{PATH}/{reply['id']}"))[0] == 404


async def test_a_server_without_a_store() -> None:
    engine = engine_replying("Hello")
    async with running(engine, response_store_bytes=0) as server:
        _, reply = await server.post(PATH, {"input": "Hi"})
        assert reply["store"] is False
        status, reply = await server.post(PATH, {"input": "Hi", "store": True})
        assert (status, reply["error"]["param"]) == (400, "store")


async def test_stored_responses_expire() -> None:
    engine = engine_replying("Hello")
    async with running(engine, response_store_seconds=0.2) as server:
        _, reply = await server.post(PATH, {"input": "Hi"})
        assert (await server.get(f"{PATH}/{reply['id']}"))[0] == 200
        # No request is needed for that.
        await until(lambda: not len(server.response_store))
        assert (await server.get(f"{PATH}/{reply['id']}"))[0] == 404


async def test_a_full_store_drops_the_oldest_of_the_largest_account() -> None:
    store = ResponseStore(10 * ENTRY_BYTES, 60)

    def put(owner: str, name: str, inputs: int) -> None:
        store.put(owner, StoredResponse(name, b"{}", b" " * inputs))

    def kept(owner: str) -> list[str]:
        names = []
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"):
            with contextlib.suppress(UnknownResponse):
                names.append(store.get(owner, name).id)
        return names

    put("bob", "b0", 0)
    for number in range(4):
        put("alice", f"a{number}", ENTRY_BYTES)
    assert store.size <= store.max_bytes
    put("bob", "b1", ENTRY_BYTES)
    put("bob", "b2", 9 * ENTRY_BYTES + 1)  # larger than the store
    assert kept("alice") == ["a1", "a2", "a3"]
    assert kept("bob") == ["b0", "b1"]
    put("bob", "b3", 9 * ENTRY_BYTES - 2)
    assert kept("alice") == []
    assert kept("bob") == ["b3"]
    assert (len(store), store.size) == (1, store.max_bytes)
    store.delete("bob", "b3")
    assert (len(store), store.size) == (0, 0)


# Refusals

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": ""}]}, "input[0].id"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
    ),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    ({"input": "x" * 100_000}, "input"),
    ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ({"tools": [{"type": "Web search!"}]}, "tools[0]"),
    ({"tools": [{"type": 5}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"include": ["nothing"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 99_999}, "max_output_tokens"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"temperature": 3}, "temperature"),
    ({"background": True, "store": False}, "background"),
    ({"background": "yes"}, "background"),
    ({"truncation": "oldest"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"stream": 1}, "stream"),
    ({"service_tier": "soon"}, "service_tier"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"priority": 101}, "priority"),
]


async def test_bad_fields_are_named(server: Running) -> None:
    for change, param in BAD_FIELDS:
        status, body = await server.post(PATH, {"input": "x", **change})
        assert status == 400, change
        assert body["error"]["param"].startswith(param), change
    deep = '{"a":' * 900 + "1" + "}" * 900
    tools = f'[{{"type": "function", "name": "f", "parameters": {deep}}}]'
    status, body = await server.post(PATH, f'{{"input": "x", "tools": {tools}}}'.encode())
    assert (status, "deep" in body["error"]["message"]) == (400, True)
    assert not server.engine.submitted


async def test_priority_salt_and_metrics_work_as_in_the_other_apis(server: Running) -> None:
    headers = {"X-Priority": "-7", "X-Request-Id": "mine"}
    status, _ = await server.post(PATH, {"input": "Hi", "cache_salt": "s", "top_k": 3}, **headers)
    [submitted] = server.engine.submitted
    assert (status, submitted.priority, submitted.cache_salt) == (200, -7, "s")
    assert submitted.params.top_k == 3
    assert server.metric("chairlift_http_requests_total", route=PATH, method="POST", status="200")
    await server.get(f"{PATH}/resp_nothing")
    route = f"{PATH}/{{response_id}}"
    assert server.metric("chairlift_http_requests_total", route=route, method="GET", status="404")


async def test_time_limits_and_draining_end_a_response() -> None:
    slow = FakeEngine(model_info(), ending("x" * 500), step_seconds=0.01)
    async with running(slow) as server:
        status, reply = await server.post(PATH, {"input": "Hi", "timeout": 0.2})
        assert (status, reply["error"]["code"]) == (504, "timeout")
        *_, error, failed = await server.named_events(PATH, {"input": "Hi", "timeout": 0.2})
        assert (error["code"], failed["response"]["status"]) == ("timeout", "failed")
        streaming = asyncio.create_task(server.named_events(PATH, {"input": "Hi"}))
        await until(lambda: len(slow.submitted) == 3)
        await server.service.drain.finish(0.0)
        *_, error, failed = await streaming
        assert (error["code"], failed["response"]["status"]) == ("draining", "failed")
        status, _ = await server.post(PATH, {"input": "Hi"})
        assert status == 503
