"""GET /metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from chairlift.api.service import SERVICE

_TEXT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


async def metrics(http: web.Request) -> web.Response:
    """All metrics of the server."""
    return exposition(http.app[SERVICE].recorder.registry)


def exposition(registry: CollectorRegistry) -> web.Response:
    """The metrics in Prometheus's text format, whatever format the client prefers.

    NOTE: prometheus_client's own handler sends OpenMetrics with escaped names to Prometheus 2:
    vLLM's ``vllm:`` becomes ``vllm_``.
    """
    response = web.Response(body=generate_latest(registry), headers=_TEXT)
    response.enable_compression()
    return response
