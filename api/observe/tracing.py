"""OpenTelemetry traces. A request's spans are made when it has ended, from its recorded times.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI and HTTP;
attributes outside of them begin with ``chairlift.``. This module needs the extra ``otel`` and is
imported only with ``--otlp-endpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from chairlift.api.http.requests import CLIENT_LEFT
from chairlift.api.http.version import VERSION
from chairlift.api.observe.request_record import ObservedGeneration, RequestRecord
from chairlift.api.observe.timing import PromptTimes

# The traced routes, and the name of each operation in the conventions.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_PATH = "/v1/traces"
# Time limit for exporting a batch. It also limits the server's stop if the collector is gone.
EXPORT_SECONDS = 3.0


def otlp_processor(endpoint: str) -> SpanProcessor:
    """A processor that sends spans to a collector in batches, from a thread.

    It drops spans when its queue is full.
    """
    base = endpoint.rstrip("/").removesuffix(_PATH)
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=base + _PATH, timeout=EXPORT_SECONDS))


class Tracing:
    """Turns ended requests into spans for ``processor``.

    If a request has a ``traceparent`` header and that trace is sampled, its spans are part of it.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        named = Resource({"service.name": "chairlift", "service.version": VERSION})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override these.
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("chairlift", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Adds the spans of an ended request, if its route is traced."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        generation = record.generation
        # Times were measured with the monotonic clock; spans need wall-clock time.
        clock = _WallClock(time.time() - time.monotonic())
        span = self._tracer.start_span(
            operation if generation is None else f"{operation} {generation.model.name}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            _http_attributes(record) | {"gen_ai.operation.name": operation},
            start_time=clock.nanoseconds(record.started),
        )
        if span.is_recording() and generation is not None:
            span.set_attributes(_generation_attributes(generation))
            if record.finish_reasons:
                span.set_attribute("gen_ai.response.finish_reasons", record.finish_reasons)
            parent = set_span_in_context(span)
            for number, times in enumerate(generation.times):
                self._add_prompt(parent, clock, number, times, record.ended)
            self._add_detokenizing(parent, clock, generation)
        if record.status >= 500 or "error" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(clock.nanoseconds(record.ended))

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()

    def _add_prompt(
        self, parent: Context, clock: _WallClock, number: int, times: PromptTimes, ended: float
    ) -> None:
        begun = times.prefill_times
        prompt = {"chairlift.prompt.index": number}
        queue = self._start("queue", parent, clock, times.arrival, prompt)
        if begun is None:
            queue.end(clock.nanoseconds(ended))
            return
        queue.end(clock.nanoseconds(begun.scheduled))
        prefill = self._start("prefill", parent, clock, begun.scheduled, prompt)
        for started, tokens in begun.chunks:
            prefill.add_event(
                "chunk", {"chairlift.chunk.tokens": tokens}, clock.nanoseconds(started)
            )
        prefill.end(clock.nanoseconds(begun.first_token))
        decode = self._start("decode", parent, clock, begun.first_token, prompt)
        decode.end(clock.nanoseconds(times.last_token or begun.first_token))

    def _add_detokenizing(
        self, parent: Context, clock: _WallClock, generation: ObservedGeneration
    ) -> None:
        detokenizing = generation.detokenizing
        if detokenizing.started is None:
            return
        busy = {"chairlift.detokenize.busy_seconds": detokenizing.busy}
        span = self._start("detokenize", parent, clock, detokenizing.started, busy)
        span.end(clock.nanoseconds(detokenizing.ended))

    def _start(
        self,
        name: str,
        parent: Context,
        clock: _WallClock,
        started: float,
        attributes: Mapping[str, AttributeValue],
    ) -> Span:
        return self._tracer.start_span(
            name, parent, attributes=attributes, start_time=clock.nanoseconds(started)
        )


class _WallClock:
    """Converts seconds of ``time.monotonic()`` to nanoseconds since 1970."""

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def nanoseconds(self, seconds: float) -> int:
        return round((seconds + self._offset) * 1e9)


def _http_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "chairlift.request.id": record.request_id,
    }
    if record.status != CLIENT_LEFT:
        attributes["http.response.status_code"] = record.status
    if record.status >= 400:
        attributes["error.type"] = str(record.status)
    return attributes


def _generation_attributes(generation: ObservedGeneration) -> dict[str, AttributeValue]:
    """Attributes of the request, from its first prompt's parameters, and of its result."""
    params = generation.prompts[0].params
    usage = generation.usage()
    return {
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": generation.model.name,
        "gen_ai.response.model": generation.model.name,
        "gen_ai.response.id": generation.id,
        "gen_ai.request.choice.count": generation.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
    }
