"""/v1/messages over HTTP: events, stop reasons, errors and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import (
    TOKENIZER,
    Running,
    ending,
    engine_replying,
    ids,
    last_prompt,
    running,
)
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits, digest_of

PATH = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODY = {"messages": MESSAGES, "max_tokens": 100}
KEY = "sk-alice-secret"


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


async def test_the_events_of_a_text_in_their_order(server: Running) -> None:
    server.engine.script = lambda request, index: Scripted(
        [*ids("Hello"), TOKENIZER.eos_token_id], ended_by_token=True, cached_tokens=5
    )
    events = await server.named_events(PATH, BODY)
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 5,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    prompt_tokens = len(server.engine.submitted[0].prompt)
    assert (message["content"], message["stop_reason"]) == ([], None)
    # NOTE: As Anthropic counts, input_tokens do not contain the cached ones.
    assert message["usage"]["input_tokens"] == prompt_tokens - 5
    assert message["usage"]["cache_read_input_tokens"] == 5
    assert "".join(event["delta"]["text"] for event in events[2:7]) == "Hello"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


async def test_stop_reasons() -> None:
    engine = FakeEngine(model_info(max_context=64), ending("one STOP two"))
    async with running(engine) as server:
        _, reply = await server.post(PATH, {**BODY, "max_tokens": 20, "stop_sequences": ["STOP"]})
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
        assert reply["content"] == [{"type": "text", "text": "one "}]
        *_, delta, _ = await server.named_events(
            PATH, {**BODY, "stop_sequences": ["x", "STO", " two"]}
        )
        assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STO"}
        engine.script = lambda request, index: Scripted(
            ids("x" * request.params.max_tokens), "length"
        )
        _, reply = await server.post(PATH, {**BODY, "max_tokens": 3})
        assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("max_tokens", 3)
        # Agents request more tokens than the context has left, which Anthropic allows.
        _, reply = await server.post(PATH, {**BODY, "max_tokens": 32_000})
        assert reply["stop_reason"] == "model_context_window_exceeded"
        assert reply["usage"]["output_tokens"] == 64 - reply["usage"]["input_tokens"]


async def test_turns_become_the_prompt(server: Running) -> None:
    body = {
        "system": [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "citations": None}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
            {"role": "system", "content": "e"},
            {"role": "user", "content": "f"},
        ],
    }
    turns = [
        *(("system", "Be brief"), ("user", "a\n\nb"), ("assistant", "c")),
        *(("user", "d"), ("system", "e"), ("user", "f")),
    ]
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    status, _ = await server.post(PATH, {**BODY, **body})
    assert (status, last_prompt(server)) == (200, f"{prompt}<|im_start|>assistant\n")
    status, count = await server.post(f"{PATH}/count_tokens", body)
    assert (status, count) == (200, {"input_tokens": len(server.engine.submitted[0].prompt)})
    assert len(server.engine.submitted) == 1


PLAIN = {"type": "text", "media_type": "text/plain", "data": "words"}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
}
REDACTED = {"type": "redacted_thinking", "data": "EmwKAhgB"}
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0]: content"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "only a text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content[0].source"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "document", "source": PLAIN}]}]},
        "belong to user",
    ),
    (
        {"messages": [{"role": "user", "content": [PDF]}]},
        "messages[0].content[0].source: PDFs and other files are not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{**PDF, "source": {**PLAIN, "data": 1}}]}]},
        "content[0].source.data",
    ),
    (
        {"messages": [{"role": "user", "content": [{**PDF, "source": {"type": "gopher"}}]}]},
        "'gopher'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "belong"),
    ({"messages": [{"role": "user", "content": [REDACTED]}]}, "belong to assistant"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
            ]
        },
        "belong",
    ),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt is too long: "),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "every"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "deeply"}}, "deeply"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": "hot"}, "temperature"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"service_tier": "batch"}, "service_tier"),
    ({"priority": 101}, "priority"),
]


async def test_bad_fields_are_named(server: Running) -> None:
    for change, named in BAD_FIELDS:
        status, body = await server.post(PATH, {**BODY, **change})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error"), change
        assert named in body["error"]["message"], change
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    deep = '{"a":' * 900 + "1" + "}" * 900
    tools = f'[{{"name": "f", "input_schema": {deep}}}]'
    data = f'{json.dumps(BODY)[:-1]}, "tools": {tools}}}'.encode()
    status, body = await server.post(PATH, data)
    assert (status, "deep" in body["error"]["message"]) == (400, True)
    assert not server.engine.submitted


async def test_errors_have_anthropics_form_everywhere_below_the_path() -> None:
    engine = engine_replying("Hello")
    keys = (ApiKey("alice", digest_of(KEY), KeyLimits(rpm=3)),)
    async with running(engine, keys=keys, max_body_bytes=1000) as server:

        async def error(method: str, path: str, body: Any, **headers: str) -> tuple[int, str]:
            headers = {"X-Api-Key": KEY, "anthropic-version": "2023-06-01", **headers}
            async with server.http.request(
                method, server.url + path, json=body, headers=headers
            ) as response:
                reply = await response.json()
                assert reply["type"] == "error"
                assert reply["request_id"] == response.headers["request-id"]
                return response.status, reply["error"]["type"]

        wrong = {"X-Api-Key": "wrong"}
        assert await error("POST", PATH, BODY, **wrong) == (401, "authentication_error")
        assert await error("POST", f"{PATH}/x", BODY) == (404, "not_found_error")
        assert await error("GET", PATH, BODY) == (405, "invalid_request_error")
        big = {**BODY, "system": "x" * 1000}
        assert await error("POST", PATH, big) == (413, "request_too_large")
        model = {**BODY, "model": "claude"}
        assert await error("POST", f"{PATH}/count_tokens", model) == (404, "not_found_error")
        late = {**BODY, "timeout": 0.001}
        engine.first_step_seconds = 0.5
        assert await error("POST", PATH, late) == (504, "timeout_error")
        assert await error("POST", PATH, BODY) == (429, "rate_limit_error")
        # Other endpoints use OpenAI's form.
        async with server.http.get(f"{server.url}/v1/messagesx") as response:
            assert set((await response.json())["error"]) >= {"param", "code"}


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    dying = FakeEngine(
        model_info(), lambda request, index: Scripted(ids("ab"), "error", error="it broke")
    )
    async with running(dying) as server:
        *_, delta, error = await server.named_events(PATH, BODY)
        assert delta["type"] == "content_block_delta"
        assert error["error"] == {"type": "api_error", "message": "it broke"}


async def test_a_silent_stream_is_kept_alive_with_pings() -> None:
    slow = FakeEngine(model_info(), ending("x"), first_step_seconds=0.3)
    async with running(slow, keep_alive_seconds=0.1) as server:
        first, *_ = await server.named_events(PATH, BODY)
        assert first == {"type": "ping"}


async def test_keys_priority_and_salt_work_as_in_the_other_apis() -> None:
    engine = engine_replying("Hello")
    keys = (ApiKey("alice", digest_of(KEY), NO_LIMITS),)
    async with running(engine, keys=keys) as server:
        headers = {"X-Api-Key": KEY, "X-Priority": "-7"}
        body = {**BODY, "cache_salt": "s", "top_k": 3, "metadata": {"user_id": "u"}}
        status, _ = await server.post(PATH, body, **headers)
        [submitted] = engine.submitted
        assert (status, submitted.priority, submitted.cache_salt) == (200, -7, "s")
        assert submitted.params.top_k == 3
        assert server.metric(
            "chairlift_http_requests_total", route=PATH, method="POST", status="200"
        )


async def test_the_error_for_a_long_prompt_has_anthropics_wording(server: Running) -> None:
    context = server.service.model().info.max_context
    form = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")

    async def refusal(length: int, path: str = PATH, **fields: Any) -> tuple[int, int] | None:
        """The numbers in the error; None if the prompt fits."""
        messages = [{"role": "user", "content": "x" * length}]
        status, body = await server.post(path, {**BODY, "messages": messages, **fields})
        if status == 200:
            return None
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        found = form.fullmatch(body["error"]["message"])
        assert found is not None, body
        return int(found[1]), int(found[2])

    _, count = await server.post(f"{PATH}/count_tokens", BODY)
    frame = count["input_tokens"] - len("Hi")
    room = context - frame  # what fills the context to the last token
    assert await refusal(room - 1) is None
    assert await refusal(room) == (context, context - 1)
    for more in (1, 2, 500):
        assert await refusal(room + more) == (context + more, context)
        assert await refusal(room + more, max_tokens=1) == (context + more, context)
    # A prompt that is too long to be tokenized: the number is a lower bound.
    for path in (PATH, f"{PATH}/count_tokens"):
        numbers = await refusal(100_000, path)
        assert numbers is not None
        assert context < numbers[0] <= 100_000 + frame
        assert numbers[1] == context
    # Other endpoints use OpenAI's wording.
    chat = {"messages": [{"role": "user", "content": "x" * room}]}
    status, body = await server.post("/v1/chat/completions", chat)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in body["error"]["message"]


async def test_a_401_names_the_header_that_anthropics_clients_send() -> None:
    engine = engine_replying("Hello")
    keys = (ApiKey("alice", digest_of(KEY), NO_LIMITS),)
    async with running(engine, keys=keys) as server:
        for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong"}):
            for path in (PATH, f"{PATH}/count_tokens"):
                status, body = await server.post(path, BODY, **headers)
                assert (status, body["error"]["type"]) == (401, "authentication_error")
                assert "invalid x-api-key" in body["error"]["message"]


async def test_the_format_is_read_from_the_beta_field_or_the_new_one(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "schema": schema}
    grammars = []
    for fields in (
        {"output_format": format},
        {"output_config": {"format": format}},
        {"output_format": format, "output_config": {"format": format}},
    ):
        beta = {"anthropic-beta": "structured-outputs-2025-11-13"}
        status, _ = await server.post(PATH, {**BODY, **fields}, **beta)
        assert status == 200
        grammars.append(server.engine.submitted[-1].params.grammar)
    assert grammars[0] is not None
    assert grammars[0] == grammars[1] == grammars[2]
    # An error names the field that was read.
    bad = {"type": "json_schema", "schema": {"type": "no type"}}
    for fields, place in (
        ({"output_format": bad}, "output_format:"),
        ({"output_config": {"format": bad}}, "output_config.format:"),
    ):
        status, body = await server.post(PATH, {**BODY, **fields})
        assert (status, body["error"]["message"].startswith(place)) == (400, True), body
