"""Too many or too large images are refused before anything is decoded, in each API."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from support.api.api_server import Running, engine_replying, running

URL = f"data:image/png;base64,{base64.b64encode(bytes(30)).decode()}"
DATA = URL.partition(",")[2]
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}


def _user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def request(path: str, count: int) -> dict[str, Any]:
    """A request with so many images."""
    image = {"type": "image", "source": SOURCE}
    match path:
        case "/v1/chat/completions" | "/tokenize":
            return _user([{"type": "image_url", "image_url": {"url": URL}}] * count)
        case "/v1/responses":
            parts = [{"type": "input_image", "image_url": URL}] * count
            return {"input": [{"role": "user", "content": parts}]}
        case "/v1/messages":
            return {**_user([image] * count), "max_tokens": 5}
        case "/v1/messages/count_tokens":
            return _user([image] * count)
        case "/api/chat":
            return _user("Hi", images=[DATA] * count)
    return {"prompt": "Hi", "images": [DATA] * count}


PATHS = [
    *("/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/api/chat", "/api/generate"),
]


def message_of(reply: Any) -> str:
    error = reply["error"]
    return str(error if isinstance(error, str) else error["message"])


async def _serves(server: Running) -> None:
    status, _ = await server.post("/v1/chat/completions", _user("Hi"))
    assert status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_thousands_of_images_get_a_400(path: str) -> None:
    async with running(engine_replying("Hello"), max_body_bytes=1 << 20) as server:
        for count in (65, 4000):
            status, reply = await server.post(path, request(path, count))
            assert (status, "at most 64 images" in message_of(reply)) == (400, True), reply
        status, reply = await server.post(path, request(path, 64))
        assert (status, "takes no images" in message_of(reply)) == (400, True), reply
        status, reply = await server.post(path, request(path, 40_000))
        assert status == 413
        assert not server.engine.submitted
        await _serves(server)


async def test_images_of_many_messages_count_together() -> None:
    async with running(engine_replying("Hello")) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            body = request(path, 1)
            turns = [*body["messages"], {"role": "assistant", "content": "a"}] * 65
            status, reply = await server.post(path, {**body, "messages": turns[:-1]})
            assert (status, "at most 64 images" in message_of(reply)) == (400, True), reply
        assert not server.engine.submitted
        await _serves(server)
