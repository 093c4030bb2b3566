"""The access log: the reason of each refusal, never a client's text; the page's own requests."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from support.api import fields_of_messages, fields_of_response_items, fields_of_responses
from support.api.api_server import CHAT, MESSAGES, Running, engine_replying, running, tool

from chairlift.api.admission.keys import NO_LIMITS, ApiKey
from chairlift.api.errors import Unauthorized
from chairlift.api.observe.access import MAX_REASON, reason_of
from chairlift.engine.errors import RequestError

MARK = "ljubljana"
CHAT_BODIES: list[dict[str, Any]] = [
    {"temperature": 1, "stop": ["a"], "logit_bias": {"1": 2}, "user": "u", "model": "org/tiny"},
    {"tools": [tool("f", {"type": "object", "properties": {"a": {"type": "string"}}})]},
    {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
    {"guided_regex": "a", "guided_grammar": "start: /a/", "reasoning_effort": "low"},
    {"structured_outputs": {"grammar": "start: /a/"}},
    {"chat_template_kwargs": {"a": 1}, "priority": 0, "cache_salt": "s", "metadata": {"a": "b"}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {"messages": [{"role": "user", "content": "Hi", "name": "nobody"}]},
]


def _marked(value: Any) -> Iterator[Any]:
    """Copies of a JSON value with MARK instead of one of its keys or leaves."""
    yield MARK
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {name: each for name, each in value.items() if name != key}
            yield {**rest, MARK: inner}
            yield from ({**value, key: marked} for marked in _marked(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ([*value[:index], marked, *value[index + 1 :]] for marked in _marked(inner))


@functools.cache
def _requests() -> list[tuple[str, Any]]:
    """Bodies with MARK in each place, by the path that they are posted to."""
    bodies = [("/v1/chat/completions", {**CHAT, **body}) for body in CHAT_BODIES]
    for path, base, cases in (
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, fields_of_messages.FIELDS),
        ("/v1/responses", {"input": "Hi"}, fields_of_responses.FIELDS),
        ("/v1/responses", {"input": "Hi"}, fields_of_response_items.ITEM_FIELDS),
    ):
        bodies += [(path, {**base, **case.context, **case.body}) for case in cases]
    return [(path, marked) for path, body in bodies for marked in _marked(body)]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hi")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
async def test_no_reason_has_a_clients_text(
    part: int, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "chairlift.api.observe.access")
    refused = 0
    # Every sixteenth of them, so that the test is short; the parts differ.
    for path, body in _requests()[part * 5 :: 16]:
        caplog.clear()
        async with server.http.post(server.url + path, json=body) as response:
            status = response.status
            await response.read()
        records = [each for each in caplog.records if each.name.endswith(".access")]
        if 400 <= status < 500:
            refused += 1
            (record,) = records
            reason = record.__dict__["reason"]
            assert reason
            assert len(reason) <= MAX_REASON
            assert MARK not in reason, (path, body, reason)
        else:
            assert all("reason" not in record.__dict__ for record in records)
    assert refused > 20


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("tools: 'my secret's name' is unknown"), "tools: … is unknown"),
        (RequestError('the text "a\nb" and `c`: no'), "the text … and …: no"),
        (RequestError("it's the server's limit"), "it's the server's limit"),
        (RequestError(r"tools: 'a \' b' is none"), "tools: … is none"),
        (RequestError("x" * 1000), "x" * (MAX_REASON - 1) + "…"),
        (Unauthorized("this server needs an API key"), "this server needs an API key"),
    ],
)
def test_reasons_are_bounded_and_without_quotes(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_librarys_text_is_left_out() -> None:
    cause = ValueError("unexpected token my secret")
    error = RequestError(f"regex: {cause}")
    error.__cause__ = cause
    assert reason_of(error) == "regex: ValueError"


async def test_the_pages_requests_are_debug(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "chairlift.api.observe.access")
    for path in ("/", "/ui/main.js", "/metrics", "/health"):
        async with server.http.get(server.url + path) as response:
            assert response.status == 200
    assert (await server.get("/nothing"))[0] == 404
    levels = [(each.__dict__["route"], each.levelname) for each in caplog.records]
    assert {level for route, level in levels if route != "unmatched"} == {"DEBUG"}
    assert ("unmatched", "INFO") in levels


async def test_a_refused_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift.api.observe.access")
    right = ApiKey("alice", hashlib.sha256(b"the right key").digest(), NO_LIMITS)
    async with running(engine_replying("Hi"), keys=(right,)) as server:
        status, _ = await server.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {MARK}")
    assert status == 401
    (record,) = caplog.records
    assert "key" in record.__dict__["reason"]
    assert MARK not in record.__dict__["reason"]
