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
    """All metrics, in Prometheus's text format whatever else the client would take.

    NOTE: to a Prometheus 2 prometheus_client's own handler speaks OpenMetrics with names escaped,
    and vLLM's ``vllm:`` becomes ``vllm_``.
    """
    response = web.Response(body=generate_latest(registry), headers=_TEXT)
    response.enable_compression()
    return response
