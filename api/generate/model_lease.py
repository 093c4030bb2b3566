"""Waits until the model that a request names is loaded, and keeps it loaded for the request."""

from __future__ import annotations

import asyncio

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.errors import NotReady, TimedOut, UnknownModel
from chairlift.api.http.early_stream import begin_stream
from chairlift.api.models.entry import Lease, ModelEntry
from chairlift.api.schemas.request import Request
from chairlift.api.service import SERVICE, ServedModel

_LEASE: web.RequestKey[Lease] = web.RequestKey("lease", Lease)


async def lease_model(http: web.Request, request: Request) -> None:
    """Loads the model that ``request`` names, unless it is loaded; ``release_model`` ends it.

    While it waits, a request that asks for a stream gets keep-alives. For a model that does not
    exist it does nothing: the handler refuses the request.

    Raises:
        NotReady: the model cannot be loaded, or not within the request's time limit.
        QueueFull: too many requests wait for this model.
        Draining: the server is stopping.
    """
    if "model" not in type(request).model_fields or _LEASE in http:
        return
    service = http.app[SERVICE]
    try:
        entry = service.entry(getattr(request, "model", None) or getattr(request, "name", None))
    except (NotReady, UnknownModel):
        return
    if entry.is_ready:
        http[_LEASE] = Lease(entry)
        return
    deadline = http[DEADLINE]
    deadline.tighten(getattr(request, "timeout", None))
    streams = bool(getattr(request, "stream", False))
    keep_alive = service.settings.keep_alive_seconds if streams else None
    try:
        async with deadline.limit():
            http[_LEASE] = await _lease(http, entry, keep_alive)
    except TimedOut as error:
        seconds = service.models.predicted_seconds(entry) or 1.0
        message = f"not ready: the model {entry.name!r} is not loaded in time"
        raise NotReady(message, seconds) from error


def leased_model(http: web.Request, name: str | None) -> ServedModel:
    """As ``Service.model``; the model's LoRA adapter, too, stays until ``release_model``."""
    model = http.app[SERVICE].model(name)
    if (lease := http.get(_LEASE)) is not None:
        lease.keep_adapter(model)
    return model


def release_model(http: web.Request) -> None:
    """Ends the request's use of its model. Does nothing if it has none."""
    if (lease := http.get(_LEASE)) is not None:
        lease.release()


async def _lease(http: web.Request, entry: ModelEntry, keep_alive: float | None) -> Lease:
    """Waits for the model. A stream begins after ``keep_alive`` seconds of waiting."""
    models = http.app[SERVICE].models
    waiting = asyncio.create_task(models.acquire(entry, http[DEADLINE].remaining))
    try:
        if keep_alive is not None:
            done, _ = await asyncio.wait({waiting}, timeout=keep_alive)
            if not done:
                await begin_stream(http, keep_alive)
        return await waiting
    except BaseException:
        if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
            waiting.result().release()
        waiting.cancel()
        raise
