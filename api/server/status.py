"""Handlers of /v1/models and below, /health, /ping, /version and /metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry, generate_latest

from chairlift.api.anthropic.models import VERSION_HEADER, model_of, models_page
from chairlift.api.errors import UNAVAILABLE_RETRY_SECONDS, NotReady
from chairlift.api.generate.answer import json_response
from chairlift.api.http.version import VERSION
from chairlift.api.models.entry import ModelEntry
from chairlift.api.openai.adapters import adapter_card
from chairlift.api.schemas.replies import HealthReply, ModelCard, ModelList, VersionReply
from chairlift.api.service import SERVICE, Service

_METRICS_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


async def list_models(http: web.Request) -> web.Response:
    """Lists the models with their states, and the LoRA adapters of those that are loaded.

    Like ``get_model``, it answers in Anthropic's form if the client is Anthropic's.
    """
    service = http.app[SERVICE]
    _check(service.entry())
    cards = [_card(entry) for entry in service.models.entries]
    adapted = [one for model in service.loaded_models for one in model.adapted]
    cards += map(adapter_card, adapted)
    if VERSION_HEADER in http.headers:
        return json_response(models_page(cards, http.query))
    return json_response(ModelList(cards))


async def get_model(http: web.Request) -> web.Response:
    """Describes a model by its id."""
    name = http.match_info["id"]
    entry = http.app[SERVICE].entry(name)
    _check(entry)
    adapted = entry.adapted(name)
    card = _card(entry) if adapted is None else adapter_card(adapted)
    return json_response(model_of(card) if VERSION_HEADER in http.headers else card)


async def load_model(http: web.Request) -> web.Response:
    """Loads a model, and replies when it is loaded."""
    service = http.app[SERVICE]
    entry = service.entry(http.match_info["id"])
    await service.models.load(entry, service.settings.request_seconds)
    return json_response(_card(entry))


async def unload_model(http: web.Request) -> web.Response:
    """Unloads a model that has no work, and replies when its memory is free."""
    service = http.app[SERVICE]
    entry = service.entry(http.match_info["id"])
    await service.models.unload(entry)
    return json_response(_card(entry))


async def health(http: web.Request) -> web.Response:
    """Replies 200 if requests can be served, else 503 with the reason."""
    service = http.app[SERVICE]
    reason = service.unhealthy
    states = service.model_states if len(service.models.entries) > 1 else UNSET
    if reason is None:
        return json_response(HealthReply("ok", models=states, degraded=_degraded(service)))
    return web.Response(
        status=503,
        body=msgspec.json.encode(HealthReply("unavailable", reason, states)),
        content_type="application/json",
        headers={"Retry-After": str(UNAVAILABLE_RETRY_SECONDS)},
    )


def _degraded(service: Service) -> str | UnsetType:
    """A description of engines that are down while other replicas serve, over all loaded models."""
    loaded = service.loaded_models
    found = [(model.name, model.client.degraded) for model in loaded]
    reasons = [(name, reason) for name, reason in found if reason is not None]
    if not reasons:
        return UNSET
    if len(service.models.entries) == 1:
        return reasons[0][1]
    return "; ".join(f"{name}: {reason}" for name, reason in reasons)


async def version(http: web.Request) -> web.Response:
    """Returns Chairlift's version."""
    return json_response(VersionReply(VERSION))


def _check(entry: ModelEntry) -> None:
    """Raises NotReady if the engine of a loaded model is down."""
    if entry.state == "loaded" and entry.model is not None and not entry.model.client.accepts:
        raise NotReady(f"not ready: {entry.unhealthy}")


def _card(entry: ModelEntry) -> ModelCard:
    model = entry.last
    card = ModelCard(
        entry.name,
        entry.created if model is None else model.created,
        None if model is None else model.info.max_context,
        (model and model.root) or entry.name,
        None if model is None else model.defaults,
        entry.state,
        entry.plan.aliases,
    )
    if model is not None:
        card.input_modalities = model.input_modalities
    if entry.state == "failed" and entry.failure is not None:
        card.reason = entry.failure
    return card


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
