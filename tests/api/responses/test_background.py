"""Responses that are generated in the background: polled, streamed from any event, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from support.api.api_server import Running, engine_replying, running, until
from support.api.credentials import ALICE, BOB, alice_and_bob, bearer

from chairlift.engine.errors import QueueFull

PATH = "/v1/responses"
MODEL = "org/tiny"
RUNNING = ("queued", "in_progress")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello", step_seconds=0.02)) as server:
        yield server


async def begin(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    response: Response = await client.responses.create(
        model=MODEL, input="Hi", background=True, **fields
    )
    assert (response.status, response.background, response.output) == ("queued", True, [])
    return response


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async with asyncio.timeout(180):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in RUNNING:
                return response
            await asyncio.sleep(0.01)


async def test_a_response_is_polled(server: Running) -> None:
    client = server.openai
    first = await begin(client, metadata={"a": "b"})
    again = await client.responses.retrieve(first.id)
    assert again.status in RUNNING
    done = await ended(client, first.id)
    assert (done.status, done.output_text, done.metadata) == ("completed", "Hello", {"a": "b"})
    assert done.usage is not None
    assert done.usage.output_tokens == 6
    second = await client.responses.create(
        model=MODEL, input="Again", previous_response_id=first.id
    )
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.content[0].text for item in items] == ["Hi", "Hello", "Again"]  # type: ignore[union-attr]
    assert server.engine.unfinished == 0


async def events_of(client: openai.AsyncOpenAI, response_id: str, **query: Any) -> list[Any]:
    stream = await client.responses.retrieve(response_id, stream=True, **query)
    return [event async for event in stream]


async def test_a_stream_continues_after_any_event(server: Running) -> None:
    client = server.openai
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 6:
            break
    await stream.close()
    assert [event.type for event in seen[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert seen[0].type == "response.created"
    response_id = seen[0].response.id
    # One continues while the response is generated, and others once it has ended.
    rest = await events_of(client, response_id, starting_after=seen[-1].sequence_number)
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello"
    assert (await ended(client, response_id)).output_text == "Hello"
    for after in range(len(events) + 2):
        numbers = [
            event.sequence_number
            for event in await events_of(client, response_id, starting_after=after)
        ]
        assert numbers == list(range(after + 1, len(events)))
    assert len(await events_of(client, response_id)) == len(events)


async def test_many_streams_of_one_response(server: Running) -> None:
    client = server.openai
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    first = await anext(stream)
    assert first.type == "response.created"
    streams = [events_of(client, first.response.id) for _ in range(5)]
    lists = await asyncio.gather(*streams)
    rest = [first, *[event async for event in stream]]
    assert all([e.type for e in one] == [e.type for e in rest] for one in lists)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.0, 0.3])
async def test_a_response_is_cancelled(pause: float, stream: bool) -> None:
    async with running(engine_replying("x" * 500, step_seconds=0.02)) as server:
        client = server.openai
        if stream:
            events = await client.responses.create(
                model=MODEL, input="Hi", background=True, stream=True
            )
            first = await anext(events)
            assert first.type == "response.created"
            response_id = first.response.id
        else:
            response_id = (await begin(client)).id
        await asyncio.sleep(pause)
        for _ in range(2):
            assert (await client.responses.cancel(response_id)).status == "cancelled"
        assert (await client.responses.retrieve(response_id)).status == "cancelled"
        if stream:
            assert [event.type async for event in events][-1] != "response.completed"
        await until(lambda: server.engine.closed)
        assert len(server.service.drain) == 0


async def test_cancelling_what_has_ended_changes_nothing(server: Running) -> None:
    response_id = (await begin(server.openai)).id
    await ended(server.openai, response_id)
    assert (await server.openai.responses.cancel(response_id)).status == "completed"
    plain = await server.openai.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await server.openai.responses.cancel(plain.id)


async def test_a_deleted_response_ends() -> None:
    async with running(engine_replying("x" * 500, step_seconds=0.02)) as server:
        response_id = (await begin(server.openai)).id
        await server.openai.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await server.openai.responses.retrieve(response_id)
        assert server.engine.closed
        assert len(server.response_store) == 0


async def test_a_failed_response_says_why() -> None:
    async with running(engine_replying("x" * 500, step_seconds=0.02)) as server:
        response_id = (await begin(server.openai, extra_body={"timeout": 0.2})).id
        failed = await ended(server.openai, response_id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "0.2 s" in failed.error.message
        server.engine.refusal = QueueFull("full", 1.0)
        status, _ = await server.post(PATH, {"input": "Hi", "background": True})
        assert status == 429


async def test_a_stopping_server_ends_responses() -> None:
    async with running(engine_replying("x" * 500, step_seconds=0.02), drain_seconds=0.2) as server:
        response_id = (await begin(server.openai)).id
        assert await server.service.drain.finish(0.2) == 1
        failed = await ended(server.openai, response_id)
        assert failed.status == "failed"
        assert (await server.post(PATH, {"input": "Hi", "background": True}))[0] == 503


async def test_bad_queries_are_named(server: Running) -> None:
    response_id = (await begin(server.openai)).id
    for query, param in (
        ("stream=yes", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=" + "9" * 30, "starting_after"),
        ("starting_after=1", "starting_after"),
        ("stream=true", "stream"),
    ):
        status, reply = await server.get(f"{PATH}/{response_id}?{query}")
        assert (status, reply["error"]["param"]) == (400, param)


async def test_responses_in_progress_belong_to_their_key() -> None:
    engine = engine_replying("x" * 300, step_seconds=0.02)
    async with running(engine, keys=alice_and_bob()) as server:
        body = {"input": "Hi", "background": True}
        _, reply = await server.post(PATH, body, **bearer(ALICE))
        path = f"{server.url}{PATH}/{reply['id']}"
        for method, route in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            async with server.http.request(method, path + route, headers=bearer(BOB)) as response:
                assert response.status == 404
        async with server.http.get(path, headers=bearer(ALICE)) as response:
            assert response.status == 200


async def test_a_server_that_stores_nothing_refuses() -> None:
    async with running(engine_replying("a"), response_store_bytes=0) as server:
        status, reply = await server.post(PATH, {"input": "Hi", "background": True})
        assert (status, reply["error"]["param"]) == (400, "background")


@pytest.mark.slow
async def test_the_reply_to_head_has_no_body() -> None:
    """Neither for a stream that goes on nor for one that has ended; the next reply follows."""
    async with running(engine_replying("Hello" * 40, step_seconds=0.02)) as slow:
        stream = await slow.openai.responses.create(
            model=MODEL, input="Hi", background=True, stream=True
        )
        first = await anext(aiter(stream))
        assert first.type == "response.created"
        path = f"{PATH}/{first.response.id}"
        for is_over in (False, True):
            if is_over:
                await ended(slow.openai, first.response.id)
            host, _, port = slow.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for method, target, end in (
                ("HEAD", f"{path}?stream=true", ""),
                ("HEAD", path, ""),
                ("GET", "/health", "Connection: close\r\n"),
            ):
                writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\n{end}\r\n".encode())
            replies = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            *empty, rest, health = replies.split(b"\r\n\r\n")
            heads = [head.partition(b"\r\n")[0] for head in (*empty, rest)]
            assert heads == [b"HTTP/1.1 200 OK"] * 3
            assert health == b'{"status":"ok"}'
