"""Handlers of /v1/models, /health, /ping, /version and /metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from chairlift.api.errors import UNAVAILABLE_RETRY_SECONDS
from chairlift.api.generate.answer import json_response
from chairlift.api.openai.adapters import model_card
from chairlift.api.schemas.replies import HealthReply, ModelList, VersionReply
from chairlift.api.service import SERVICE
from chairlift.api.version import VERSION

_METRICS_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


async def list_models(http: web.Request) -> web.Response:
    """Lists the served model and its LoRA adapters."""
    model = http.app[SERVICE].model()
    return json_response(ModelList([model_card(one) for one in (model, *model.adapted)]))


async def get_model(http: web.Request) -> web.Response:
    """Describes a model by its id."""
    return json_response(model_card(http.app[SERVICE].model(http.match_info["id"])))


async def health(http: web.Request) -> web.Response:
    """Replies 200 if requests can be served, else 503 with the reason."""
    reason = http.app[SERVICE].unhealthy
    if reason is None:
        return json_response(HealthReply("ok"))
    return web.Response(
        status=503,
        body=msgspec.json.encode(HealthReply("unavailable", reason)),
        content_type="application/json",
        headers={"Retry-After": str(UNAVAILABLE_RETRY_SECONDS)},
    )


async def version(http: web.Request) -> web.Response:
    """Returns Chairlift's version."""
    return json_response(VersionReply(VERSION))


async def metrics(http: web.Request) -> web.Response:
    """All metrics of the server."""
    return exposition(http.app[SERVICE].recorder.registry)


def exposition(registry: CollectorRegistry) -> web.Response:
    """The metrics in Prometheus's text format, whatever format the client prefers.

    NOTE: prometheus_client's own handler sends OpenMetrics with escaped names to Prometheus 2:
    vLLM's ``vllm:`` becomes ``vllm_``.
    """
    response = web.Response(body=generate_latest(registry), headers=_METRICS_TYPE)
    response.enable_compression()
    return response
