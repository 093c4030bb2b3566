"""What goes wrong: malformed requests, full queues, clients that leave, engines that die."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from support.api.api_server import (
    CHAT,
    MESSAGES,
    Running,
    chosen,
    ending,
    ids,
    running,
    tool,
    until,
)
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.errors import problem_of
from chairlift.cache.capacity import KVGeometry
from chairlift.engine.errors import QueueFull
from chairlift.engine.messages import Submit
from chairlift.scheduler.limits import Limits


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), ending("Hello world"))) as server:
        yield server


def nested(depth: int) -> str:
    """An object in an object in an object, as JSON."""
    return '{"a": ' * depth + "{}" + "}" * depth


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ["x"]}, "cache_salt"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"priority": 10**30}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": "1"}, "priority"),
    ({"priority": True}, "priority"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 129}, "n"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "tools"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools"),
    ({"tools": [tool("f")] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice"),
    ({"tool_choice": chosen("g"), "tools": [tool("f")]}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"chat_template_kwargs": json.loads(nested(100))}, "chat_template_kwargs"),
    ({"tools": [tool("f", json.loads(nested(100)))]}, "tools[0].function.parameters"),
    ({"guided_json": json.loads(nested(100))}, "guided_json"),
    ({"tools": [tool("f")], "guided_json": nested(2000)}, "guided_json"),
    ({"thinking_token_budget": 10}, "thinking_token_budget"),
    ({"tools": [tool("f")], "guided_regex": "a"}, "guided_regex"),
    ({"tools": [tool("f")], "guided_json": "true"}, "guided_json"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"guided_json": []}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
]


@pytest.mark.parametrize(("change", "param"), BAD_FIELDS, ids=lambda part: str(part)[:40])
async def test_bad_chat_fields_are_named(
    server: Running, change: dict[str, Any], param: str
) -> None:
    status, body = await server.post("/v1/chat/completions", {**CHAT, **change})
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not server.engine.submitted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"] * 30}, "prompt"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "x", "cache_salt": True}, "cache_salt"),
    ],
)
async def test_bad_completion_fields_are_named(
    server: Running, body: dict[str, Any], param: str
) -> None:
    status, reply = await server.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{}",
        b'{"messages": "\xff"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_bodies_that_are_not_json_objects(server: Running, path: str, body: bytes) -> None:
    status, reply = await server.post(path, body)
    assert status == 400
    assert reply["error"]["message"]
    # and the server goes on
    status, _ = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 200


async def test_wrong_content_types_and_encodings(server: Running) -> None:
    path = "/v1/completions"
    status, _ = await server.post(path, {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert status == 415
    zipped = gzip.compress(b'{"prompt": "x"}')
    status, _ = await server.post(path, zipped, **{"Content-Encoding": "gzip"})
    assert status == 200
    status, _ = await server.post(path, b"not gzip", **{"Content-Encoding": "gzip"})
    assert status == 400


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
    # Whatever of a message a template may show.
    for field in ("content", "name", "tool_call_id", "reasoning_content"):
        messages = [{"role": "user", "content": "", field: "x" * 100_000}]
        status, body = await server.post("/v1/chat/completions", {"messages": messages})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), field
    # The default is what there is room for.
    status, _ = await server.post("/v1/completions", {"prompt": "x" * 2040})
    assert server.engine.submitted[-1].params.max_tokens == 8


async def test_what_never_fits_the_memory_is_refused_with_the_numbers() -> None:
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


async def test_fields_of_other_doors_are_refused_where_they_are_not_known(server: Running) -> None:
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


async def test_a_queue_that_fills_half_way_takes_nothing(server: Running) -> None:
    original = server.engine.submit

    def submit(request: Submit) -> Any:
        if len(server.engine.submitted) == 2:
            raise QueueFull("the queue is full", 1.0)
        return original(request)

    server.engine.submit = submit  # type: ignore[method-assign]
    status, _ = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 429
    assert len(server.engine.closed) == 2


# Life and death


async def test_loading() -> None:
    async with running(FakeEngine(None, ending("x"))) as server:
        for path in ("/health", "/ping"):
            status, body = await server.get(path)
            assert (status, body["reason"]) == (503, "loading the model")
        with pytest.raises(openai.InternalServerError) as error:
            await server.openai.completions.create(model="org/tiny", prompt="x")
        assert error.value.status_code == 503
        assert int(error.value.response.headers["Retry-After"]) >= 1
        status, _ = await server.get("/v1/models")
        assert status == 503
        async with server.http.get(f"{server.url}/metrics") as response:
            assert response.status == 200


async def test_an_unhealthy_engine(server: Running) -> None:
    server.engine.unhealthy = "no step for 60 s"
    status, body = await server.get("/health")
    assert (status, body["reason"]) == (503, "no step for 60 s")
    status, _ = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 503


async def test_an_engine_that_dies_ends_streams_with_an_error_event() -> None:
    engine = FakeEngine(model_info(), ending("x" * 1000), step_seconds=0.01)
    async with running(engine) as server:
        stream = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True
        )
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "n": 2}))
        await anext(aiter(stream))
        await until(lambda: len(engine.submitted) == 2)
        engine.dead.set()
        with pytest.raises(openai.APIError, match="has ended"):
            async for _ in stream:
                pass
        status, body = await whole
        assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_a_choice_that_fails() -> None:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(ids("abc"), finish="error", error="out of memory")

    async with running(FakeEngine(model_info(), script)) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["message"]) == (500, "out of memory")
        events = await server.events("/v1/chat/completions", CHAT)
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_frees_its_rows(stream: bool, n: int) -> None:
    engine = FakeEngine(model_info(), ending("x" * 1000), step_seconds=0.01)
    async with running(engine) as server:
        body = {"prompt": "x", "stream": stream, "n": n}

        async def go() -> None:
            async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
                await response.read()

        task = asyncio.create_task(go())
        await until(lambda: engine.submitted)
        await asyncio.sleep(0.05)
        task.cancel()
        await until(lambda: engine.closed)
        await until(lambda: server.metric("chairlift_client_disconnects_total") == 1)


async def test_silent_streams_are_kept_alive() -> None:
    engine = FakeEngine(model_info(), ending("late"), first_step_seconds=0.35)
    async with running(engine, keep_alive_seconds=0.1) as server:
        events = await server.events("/v1/chat/completions", CHAT)
        assert 2 <= events.count(": keep-alive") <= 4
        assert events[0] == ": keep-alive"
        reply = await server.openai.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
        assert text == "late"
