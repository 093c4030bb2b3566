"""Paths with extra slashes or without /v1, and HEAD requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import CHAT, Running, ending, running
from support.api.fake_engine import FakeEngine, model_info
from yarl import URL

from chairlift.api.admission.keys import ApiKey, KeyLimits, digest_of
from chairlift.api.server.paths import plain_path
from chairlift.api.server.routes import ROUTES

GETS = [route.path for route in ROUTES if route.method == "GET" and "_id}" not in route.path]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hello"))) as server:
        yield server


def variants(path: str) -> list[str]:
    """Other spellings of a path that the server accepts."""
    found = [path + "/", path + "//", "/" + path, path.replace("/", "//"), path + "/?a=b"]
    if path.startswith("/v1/"):
        found += [path.removeprefix("/v1"), path.removeprefix("/v1") + "/", "/" + path[3:]]
    return found


async def request(server: Running, method: str, path: str, **more: Any) -> tuple[int, bytes, str]:
    # NOTE: yarl normalizes paths unless they are marked as encoded.
    url = URL(server.url + path, encoded=True)
    async with server.http.request(method, url, allow_redirects=False, **more) as response:
        return response.status, await response.read(), response.headers["Content-Type"]


@pytest.mark.parametrize("path", BODIES)
async def test_posts_work_with_every_spelling_of_their_path(server: Running, path: str) -> None:
    route = {"route": path, "method": "POST", "status": "200"}
    for count, way in enumerate([path, *variants(path)], 1):
        status, body, _ = await request(server, "POST", way, json=BODIES[path])
        assert status == 200, (way, body)
        # All spellings count as one route.
        assert server.metric("chairlift_http_requests_total", **route) == count


@pytest.mark.parametrize("path", GETS)
async def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    path = path.replace("{id}", "org/tiny")
    for way in [path, *variants(path)]:
        status, body, kind = await request(server, "GET", way)
        assert (status, bool(body)) == (200, True), way
        assert await request(server, "HEAD", way) == (200, b"", kind), way


async def test_streams_and_errors_with_other_spellings(server: Running) -> None:
    url = URL(server.url + "//chat/completions/", encoded=True)
    async with server.http.post(url, json={**CHAT, "stream": True}) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    status, body, _ = await request(server, "POST", "/messages/", json={})
    assert (status, b'"type":"error"' in body) == (400, True)
    for method, path, expected in (
        ("GET", "/v1//", 404),
        ("GET", "/chat", 404),
        ("GET", "/v1/v1/models", 404),
        ("GET", "/modelsx", 404),
        ("GET", "/chat/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("POST", "/models", 405),
    ):
        assert (await request(server, method, path))[0] == expected, path


async def test_no_spelling_bypasses_the_keys() -> None:
    key = ApiKey("k", digest_of("secret"), KeyLimits(None, None, None))
    async with running(FakeEngine(model_info(), ending("Hello")), keys=(key,)) as server:
        for path in BODIES:
            for way in variants(path):
                assert (await request(server, "POST", way, json=BODIES[path]))[0] == 401, way
        assert (await request(server, "HEAD", "/health/"))[0] == 200
        assert (await request(server, "HEAD", "/models"))[0] == 401


@given(st.lists(st.sampled_from(["/", "v1", "models", "chat", "a%2Fb", "ui", "."]), max_size=8))
def test_normalizing_a_path_is_idempotent(parts: list[str]) -> None:
    path = "/" + "".join(parts)
    plain = plain_path(path)
    assert plain_path(plain) == plain
    assert plain.startswith("/")
    assert "//" not in plain
    assert plain == "/" or not plain.endswith("/")


async def test_an_absolute_url_of_a_proxy_request_works(server: Running) -> None:
    proxy = aiohttp.ClientTimeout(total=5)
    async with server.http.get(
        "http://elsewhere.invalid/health", proxy=server.url, timeout=proxy
    ) as response:
        assert response.status == 200
