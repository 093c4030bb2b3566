"""Traces, read from OpenTelemetry's in-memory exporter and from an OTLP collector."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GenAiOperationNameValues,
)
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from opentelemetry.trace import SpanKind, StatusCode
from support.api.api_server import CHAT, END, Running, ids, running, until
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.tiny import tiny_model_dir

from chairlift.api.cli.main import main
from chairlift.api.observe.tracing import OPERATIONS, Tracing, otlp_processor
from chairlift.api.server.routes import ROUTES
from chairlift.api.service import ServedModel
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.client.local import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import QueueFull
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.tokenizer import load_tokenizer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETION = {"prompt": "Where is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
# All attribute names of OpenTelemetry's conventions.
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, http_attributes, error_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def server(exporter: InMemorySpanExporter) -> AsyncIterator[Running]:
    script = Scripted([*ids("Rome"), END], ended_by_token=True, cached_tokens=2)
    tokenizer = byte_tokenizer(special=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    engine = FakeEngine(model_info(vocab_size=300), lambda request, index: script)
    async with running(engine, tokenizer) as server:
        server.service.tracing = Tracing(SimpleSpanProcessor(exporter))
        yield server


def spans_of(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    """Spans by the first word of their name, which the model's name follows."""
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name.split()[0], []).append(span)
    return spans


async def test_a_request_is_a_tree_of_spans_on_the_wall_clock(
    server: Running, exporter: InMemorySpanExporter
) -> None:
    started = time.time_ns()
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "a-1"}
    status, reply = await server.post("/v1/chat/completions", CHAT, **traced)
    ended = time.time_ns()
    assert status == 200
    spans = spans_of(exporter)
    assert {name: len(each) for name, each in spans.items()} == dict.fromkeys(
        ("chat", "queue", "prefill", "decode", "detokenize"), 1
    )
    (request,) = spans["chat"]
    assert request.name == "chat org/tiny"
    assert request.kind is SpanKind.SERVER
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.response.id"] == reply["id"]
    assert attributes["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["http.response.status_code"] == 200
    assert attributes["chairlift.request.id"] == "a-1"
    assert {name for name in attributes if not name.startswith("chairlift.")} <= CONVENTIONS
    inner = [spans[name][0] for name in ("queue", "prefill", "decode", "detokenize")]
    for span in inner:
        assert span.parent == request.context
    queue, prefill, decode, _ = inner
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    first, second = prefill.events
    assert first.timestamp == prefill.start_time
    assert (first.attributes or {})["chairlift.chunk.tokens"] == reply["usage"]["prompt_tokens"] - 1
    assert (second.attributes or {})["chairlift.chunk.tokens"] == 1
    # Two clocks are read at slightly different times: allow a millisecond.
    times = [started - 10**6, queue.start_time, prefill.start_time, decode.start_time]
    times += [decode.end_time, ended + 10**6]
    assert times == sorted(times, key=lambda each: each or 0)


# One of these is a valid request of every route that uses the model.
BODIES: list[dict[str, Any]] = [
    CHAT,
    {**CHAT, "max_tokens": 9},
    {"input": "Hi"},
    {"prompt": "Hi"},
    {"input_prefix": "Hi"},
]
# The routes that do other work, whose valid requests may have other bodies.
OTHERS = {
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
    *("/apply-template", "/api/show", "/v1/batches", "/v1/rerank", "/v2/rerank", "/v1/score"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.request is not None])
async def test_every_route_that_uses_the_model_has_its_spans(
    server: Running, exporter: InMemorySpanExporter, path: str
) -> None:
    statuses = []
    for body in BODIES:
        exporter.clear()
        server.engine.submitted.clear()
        body = {"model": "org/tiny", "stream": False, **body}
        statuses.append((await server.post(path, body))[0])
        if server.engine.submitted:
            break
    assert bool(server.engine.submitted) == (path not in OTHERS), statuses
    if path in OTHERS:
        assert not exporter.get_finished_spans()
        return
    assert statuses[-1] == 200
    operation = OPERATIONS[path]
    assert operation in {value.value for value in GenAiOperationNameValues}
    (request,) = spans_of(exporter)[operation]
    assert request.name == f"{operation} org/tiny"
    attributes = dict(request.attributes or {})
    assert attributes["http.route"] == path
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.request.model"] == "org/tiny"
    assert {"queue", "prefill"} <= set(spans_of(exporter))


def test_operations_are_of_routes() -> None:
    assert OPERATIONS.keys() <= {route.path for route in ROUTES if route.request is not None}


async def test_unsampled_and_other_requests_have_no_spans(
    server: Running, exporter: InMemorySpanExporter
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert (await server.post("/v1/chat/completions", CHAT, **unsampled))[0] == 200
    await server.get("/health")
    assert not exporter.get_finished_spans()


async def test_spans_of_refused_and_failed_requests(
    server: Running, exporter: InMemorySpanExporter
) -> None:
    await server.post("/v1/completions", {"prompt": 5})
    server.engine.refusal = QueueFull("full", 3)
    await server.post("/v1/completions", {"prompt": "x"})
    server.engine.refusal = None
    # The status is sent before the engine dies.
    server.engine.step_seconds = 0.2
    failing = asyncio.create_task(server.events("/v1/completions", {"prompt": "x"}))
    await until(lambda: server.engine.submitted)
    server.engine.dead.set()
    await failing
    invalid, refused, failed = spans_of(exporter)["text_completion"]
    assert invalid.name == "text_completion"
    assert (invalid.attributes or {})["error.type"] == "400"
    assert (refused.attributes or {})["error.type"] == "429"
    assert refused.status.status_code is StatusCode.UNSET
    assert (failed.attributes or {})["gen_ai.response.finish_reasons"] == ("error",)
    assert failed.status.status_code is StatusCode.ERROR


async def test_chunks_of_a_real_engine_reach_a_collector(tmp_path: Path) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    collector = web.Application()
    collector.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(collector)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"

    source = ModelSource("tiny", "directory", tiny_model_dir(tmp_path, "llama"))
    config = EngineConfig(max_rows=4, max_step_tokens=16, kv_memory=64 << 20)
    client = LocalClient(config, source)
    info = await client.start()
    try:
        async with running(FakeEngine(None, lambda request, index: Scripted([]))) as server:
            vocabulary = Vocabulary(load_tokenizer(source), info.vocab_size, server.service.workers)
            server.service.serve_loaded(ServedModel("tiny", client, vocabulary))
            tracing = server.service.tracing = Tracing(otlp_processor(endpoint))
            prompts = {**COMPLETION, "prompt": ["b" * 50, "c"]}
            assert (await server.post("/v1/completions", prompts))[0] == 200
            await asyncio.to_thread(tracing.close)
    finally:
        await client.stop()
        await runner.cleanup()
    (export,) = received
    (resource,) = export.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "chairlift"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == sorted(
        [*("queue", "prefill", "decode") * 2, "detokenize", "text_completion tiny"]
    )
    tokens = [
        [event.attributes[0].value.int_value for event in span.events]
        for span in spans
        if span.name == "prefill"
    ]
    assert sorted(map(sum, tokens)) == [1, 50]
    assert len(max(tokens, key=sum)) >= 4
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)


def test_without_the_extra_the_flag_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk")
    with pytest.raises(SystemExit):
        main(["serve", "--otlp-endpoint", "http://127.0.0.1:4318"])
    assert "pip install opentelemetry-sdk opentelemetry-exporter" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--otlp-endpoint", "127.0.0.1:4317"])
    assert "is not an http:// or https:// address" in capsys.readouterr().err
