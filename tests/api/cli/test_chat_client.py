"""The chat's client beside servers that are not Chairlift."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from chairlift.api.cli.chat.client import ChatClient, ChatError, Speed


async def reply(*events: str) -> str:
    async def stream(request: web.Request) -> web.Response:
        return web.Response(text="".join(f"data: {event}\n\n" for event in events))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", stream)
    async with TestServer(app) as server:
        client = ChatClient(str(server.make_url("/")), None)
        return "".join([delta.text async for delta in client.reply({}, [], Speed())])


async def test_fields_may_be_null() -> None:
    chunks = (
        '{"choices": null, "usage": null, "error": null}',
        '{"choices": [{"delta": null}, {}, {"delta": {"content": null}}]}',
        '{"choices": [{"delta": {"content": "Hi"}}]}',
        '{"choices": [], "usage": {"completion_tokens": null}}',
    )
    assert await reply(*chunks, "[DONE]") == "Hi"


@pytest.mark.parametrize(
    "event",
    [
        *("null", "[]", '"text"', '{"choices": 3}', '{"choices": [null]}'),
        '{"choices": [{"delta": "Hi"}]}',
        '{"choices": [{"delta": {"content": [{"type": "text", "text": "Hi"}]}}]}',
        "{",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
async def test_what_is_no_chunk_ends_the_reply_and_not_the_conversation(event: str) -> None:
    with pytest.raises(ChatError):
        await reply(event, "[DONE]")
