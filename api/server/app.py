"""Builds the aiohttp application from the routes and middlewares."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from chairlift.api.admission.admission import Access, add_limit_headers, admission
from chairlift.api.admission.cors import allow_origins, refuse_other_origins
from chairlift.api.errors import problem_of
from chairlift.api.generate.answer import log_failure
from chairlift.api.generate.model_lease import release_model
from chairlift.api.http.early_stream import FRAMINGS, close_stream, end_stream, is_early
from chairlift.api.http.encodings import check_transfer_coding
from chairlift.api.http.expectations import EXPECTED, check_expectation
from chairlift.api.http.requests import CLIENT_LEFT, REQUEST_ID_KEY, Handler, route_of
from chairlift.api.observe.access import log_request
from chairlift.api.observe.lag import lag_recording
from chairlift.api.observe.live import history_recording
from chairlift.api.observe.page import EVENTS, PAGE_PATHS, add_page
from chairlift.api.observe.request_record import RequestRecord
from chairlift.api.ollama.models import ollama_running
from chairlift.api.openai.batches.runner import BATCH_RUNNER, BatchRunner, batches_running
from chairlift.api.openai.batches.storage import STORAGE, Storage
from chairlift.api.responses.background import (
    BACKGROUND,
    BackgroundResponses,
    background_running,
)
from chairlift.api.responses.store import RESPONSE_STORE, ResponseStore
from chairlift.api.server.openapi import document_bytes
from chairlift.api.server.routes import ROUTES, error_format_of
from chairlift.api.server.status import metrics
from chairlift.api.service import SERVICE, Service
from chairlift.engine.logs.setup import REQUEST_ID

# A request id that the client sends is echoed and logged only if it matches this.
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _access() -> dict[tuple[str, str], Access]:
    # The page, metrics and the API's description are not in ROUTES.
    gets: dict[str, Access] = dict.fromkeys((*PAGE_PATHS, "/openapi.json", "/metrics"), "free")
    gets |= {route.path: route.access for route in ROUTES if route.method == hdrs.METH_GET}
    others = {
        (route.method, route.path): route.access
        for route in ROUTES
        if route.method != hdrs.METH_GET
    }
    methods = (hdrs.METH_GET, hdrs.METH_HEAD)
    return others | {(method, path): gets[path] for method in methods for path in gets}


# Access by method and route pattern.
ACCESS: Mapping[tuple[str, str], Access] = _access()


def build_app(service: Service) -> web.Application:
    """Builds the application. The model of ``service`` may still be loading."""
    settings = service.settings
    admit = admission(ACCESS, service.accounts, service.drain, settings.request_seconds)
    app = web.Application(middlewares=[_boundary, admit], client_max_size=settings.max_body_bytes)
    app[SERVICE] = service
    app[FRAMINGS] = {(route.method, route.path): route.framing for route in ROUTES}
    app[RESPONSE_STORE] = ResponseStore(
        settings.response_store_bytes, settings.response_store_seconds
    )
    app[BACKGROUND] = BackgroundResponses(service, app[RESPONSE_STORE])
    app.cleanup_ctx.append(background_running)
    app[STORAGE] = Storage(settings)
    app[BATCH_RUNNER] = BatchRunner(app)
    app.on_cleanup.append(_end_workers)
    app.cleanup_ctx.append(lag_recording(service.recorder, service.drain))
    app.cleanup_ctx.append(batches_running)
    app.on_response_prepare.extend((_name_request, add_limit_headers))
    refuse_other_origins(app, settings.cors_origins)
    if settings.cors_origins:
        allow_origins(app, settings.cors_origins)
    for route in ROUTES:
        # A model's id may contain slashes.
        path = route.path.replace("{id}", "{id:.+}")
        app.router.add_route(route.method, path, route.handler)
        if route.method == hdrs.METH_GET:
            app.router.add_route(hdrs.METH_HEAD, path, route.handler)
    if settings.metrics_port is None:
        app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", _openapi)
    if settings.ui:
        app.cleanup_ctx.append(history_recording(service.live, service))
        add_page(app, service.live, service, settings.keep_alive_seconds)
    else:
        # Ollama's clients look here whether the server runs; the page answers them, too.
        app.router.add_get("/", ollama_running)
    return app


async def _openapi(request: web.Request) -> web.Response:
    # The first request builds the document, on another thread: streams must not wait for it.
    body = await asyncio.to_thread(document_bytes)
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives each request an id, replies to exceptions in the route's error format, and records it.

    It encloses all other middlewares.
    """
    started = time.monotonic()
    client_id = request.headers.get("X-Request-Id", "")
    request_id = client_id if _SANE_ID.fullmatch(client_id) else uuid.uuid4().hex
    request[REQUEST_ID_KEY] = request_id
    logged = REQUEST_ID.set(request_id)
    service = request.app[SERVICE]
    recorder = service.recorder
    status = CLIENT_LEFT
    failure: Exception | None = None
    try:
        check_transfer_coding(request)
        check_expectation(request)
        response = await handler(request)
        status = response.status
        if is_early(request, response):
            return response
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        return await end_stream(request, response.body, is_error=False) or response
    except (asyncio.CancelledError, ConnectionResetError):
        # If the connection is still open, the server is stopping and has cancelled the handler.
        has_left = request.transport is None or request.transport.is_closing()
        # Clients of the page's event stream always leave this way.
        if has_left and route_of(request) != EVENTS:
            recorder.record_disconnect()
        raise
    except Exception as error:
        failure = error
        problem = problem_of(error)
        status = problem.status
        log_failure(status, error)
        if problem.rejected is not None:
            recorder.record_rejected(problem.rejected)
        reply = error_format_of(request.path, request.headers).reply(problem, request_id)
        early = await end_stream(request, msgspec.json.encode(reply), True)
        if early is not None:
            return early
        error_response = problem.response(reply)
        if EXPECTED in request:
            # The client need not send its body.
            error_response.force_close()
        return error_response
    finally:
        close_stream(request)
        release_model(request)
        record = RequestRecord.from_request(request, request_id, status, started)
        recorder.record_http(record.route, record.method, status, record.seconds)
        log_request(record, failure)
        if ACCESS.get((record.method, record.route)) == "work":
            service.live.record_request(record)
        if service.tracing is not None:
            service.tracing.record(record, request.headers)
        REQUEST_ID.reset(logged)


async def _end_workers(app: web.Application) -> None:
    app[SERVICE].workers.close()
    app[SERVICE].image_workers.close()


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID_KEY in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID_KEY]
        if (header := error_format_of(request.path, request.headers).id_header) is not None:
            response.headers[header] = request[REQUEST_ID_KEY]
