"""Refused requests: too long, an unknown model, another API's field, a full queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from support.api.api_server import (
    CHAT,
    MESSAGES,
    Running,
    ending,
    engine_replying,
    running,
)
from support.api.fake_engine import FakeEngine, model_info

from chairlift.api.errors import problem_of
from chairlift.cache.capacity import KVGeometry
from chairlift.engine.errors import QueueFull
from chairlift.engine.messages import Submit
from chairlift.scheduler.limits import Limits


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello world")) as server:
        yield server


async def test_bodies_too_large() -> None:
    engine = FakeEngine(model_info(), ending("x"))
    async with running(engine, max_body_bytes=1000) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x" * 2000})
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert server.metric("chairlift_requests_rejected_total", reason="too_large") == 1


async def test_context_length(server: Running) -> None:
    status, body = await server.post("/v1/completions", {"prompt": "x" * 2048})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = await server.post("/v1/completions", {"prompt": "x" * 2000, "max_tokens": 49})
    assert (status, body["error"]["param"]) == (400, "max_tokens")
    assert "2048" in body["error"]["message"]
    assert "2000" in body["error"]["message"]
    status, _ = await server.post("/v1/completions", {"prompt": "x" * 2000, "max_tokens": 48})
    assert status == 200
    # Every field of a message that a template may show.
    for field in ("content", "name", "tool_call_id", "reasoning_content"):
        messages = [{"role": "user", "content": "", field: "x" * 100_000}]
        status, body = await server.post("/v1/chat/completions", {"messages": messages})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), field
    # The default of max_tokens fills the context.
    status, _ = await server.post("/v1/completions", {"prompt": "x" * 2040})
    assert server.engine.submitted[-1].params.max_tokens == 8


async def test_a_request_that_never_fits_in_memory_is_refused_with_the_numbers() -> None:
    limits = Limits(8, 64, 100_000, KVGeometry(100, {32: 50}))
    longest = limits.max_context
    info = model_info(max_context=longest, limits=limits, kv_limit_bytes=100_000)
    async with running(FakeEngine(info, ending("x"))) as server:
        body = {"prompt": "x" * (longest - 10), "max_tokens": 10}
        status, _ = await server.post("/v1/completions", body)
        assert status == 200
        body["max_tokens"] = 11
        status, reply = await server.post("/v1/completions", body)
        error = reply["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "max_tokens"
        assert limits.shortage(longest + 1) in error["message"]
        assert f"{longest - 10} tokens in the prompt and 11 for" in error["message"]
        assert server.metric("chairlift_requests_rejected_total", reason="context_length") == 1


async def test_long_texts_are_tokenized_too() -> None:
    engine = FakeEngine(model_info(max_context=10**6), ending("x"))
    async with running(engine) as server:
        text = "lorem " * 10_000
        messages = [{"role": "user", "content": text}]
        status, body = await server.post("/v1/chat/completions", {"messages": messages})
        assert status == 200
        assert body["usage"]["prompt_tokens"] > len(text)


async def test_unknown_models_and_routes(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await server.openai.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("gpt-5")
    status, body = await server.get("/v2/nothing")
    assert (status, body["error"]["code"]) == (404, "not_found")
    async with server.http.get(f"{server.url}/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    assert server.metric(
        "chairlift_http_requests_total", route="unmatched", method="GET", status="404"
    )


async def test_fields_of_other_apis_are_refused(server: Running) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {**CHAT, "max_tokens": 5},
    }
    fields: dict[str, Any] = {
        **{"max_output_tokens": 5, "stop_sequences": ["a"], "instructions": "a", "system": "a"},
        **{"stop": "a", "n": 2, "seed": 1, "response_format": {"type": "json_object"}},
    }
    known = {
        "/v1/chat/completions": {"stop", "n", "seed", "response_format"},
        "/v1/completions": {"stop", "n", "seed", "response_format"},
        "/v1/responses": {"max_output_tokens", "instructions"},
        "/v1/messages": {"stop_sequences", "system"},
    }
    for path, body in bodies.items():
        for name, value in fields.items():
            status, reply = await server.post(path, {**body, name: value})
            assert status == (200 if name in known[path] else 400), (path, name)
            assert status == 200 or reply["error"]["message"] == f"{name} is not supported"
    counted = {**CHAT, "max_tokens": 5, "stop": "a"}
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert (await server.post(path, counted))[0] == 200


async def test_unknown_fields_are_logged_once(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{**MESSAGES[0], "mood": 1}, {**MESSAGES[0], "mood": 2}]
    options = {"stream": True, "stream_options": {"bar": 2}}
    body = {"messages": messages, "foo": 1, "my text": 1, **options}
    await server.events("/v1/chat/completions", body)
    (line,) = [record.message for record in caplog.records if "unknown" in record.message]
    start = "ignored unknown request fields: foo, (no identifiers), "
    assert line in (f"{start}bar, mood", f"{start}mood, bar")


async def test_a_full_queue_is_a_429(server: Running) -> None:
    server.engine.refusal = QueueFull("the queue is full", retry_after=2.3)
    with pytest.raises(openai.RateLimitError) as error:
        await server.openai.completions.create(model="org/tiny", prompt="x")
    assert error.value.response.headers["Retry-After"] == "3"
    assert server.metric("chairlift_requests_rejected_total", reason="queue_full") == 1
    assert problem_of(QueueFull("", 0.0)).headers["Retry-After"] == "1"


async def test_a_queue_that_fills_during_a_request_takes_none_of_its_prompts(
    server: Running,
) -> None:
    original = server.engine.submit

    def submit(request: Submit) -> Any:
        if len(server.engine.submitted) == 2:
            raise QueueFull("the queue is full", 1.0)
        return original(request)

    server.engine.submit = submit  # type: ignore[method-assign]
    status, _ = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 429
    assert len(server.engine.closed) == 2
