"""Sends a request to the handler of its route without a connection."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from chairlift.api.admission.deadline import DEADLINE, Deadline
from chairlift.api.admission.priority import HEADER
from chairlift.api.admission.ratelimit import ACCOUNT, Account
from chairlift.api.errors import Draining, problem_of
from chairlift.api.generate.answer import log_failure
from chairlift.api.generate.model_lease import release_model
from chairlift.api.http.requests import REQUEST_ID_KEY
from chairlift.api.service import SERVICE
from chairlift.engine.logs.setup import REQUEST_ID
from chairlift.engine.messages import MAX_PRIORITY
from chairlift.engine.workers.pool import CLIENT

_HEADERS = CIMultiDictProxy(
    CIMultiDict({hdrs.CONTENT_TYPE: "application/json", HEADER: str(MAX_PRIORITY)})
)
# The status of a reply that says nothing about the request: the server cannot run it now.
_TRANSIENT = (429, 503)


class Reply(NamedTuple):
    """The reply to a request.

    Attributes:
        status: the HTTP status.
        body: the reply's JSON.
        retry_after: seconds until the server may be able to run the request; None if it did.
    """

    status: int
    body: bytes
    retry_after: float | None = None


class _NoConnection(NamedTuple):
    """The attributes of a connection that a request reads."""

    ssl_context: None = None
    peername: None = None
    sockname: None = None
    transport: None = None


class _LocalRequest(web.Request):
    """A request with all of its body, made by this process."""

    def __init__(self, path: str, body: bytes) -> None:
        message = RawRequestMessage(
            *(hdrs.METH_POST, path, HttpVersion11, _HEADERS, ()),
            *(False, None, False, False, URL(path)),
        )
        task = asyncio.current_task()
        assert task is not None, "called by a task"
        super().__init__(
            message,
            EMPTY_PAYLOAD,
            cast(RequestHandler, _NoConnection()),
            cast(AbstractStreamWriter, None),
            task,
            asyncio.get_running_loop(),
        )
        # As if it had been read.
        self._read_bytes = body

    async def resolve(self, app: web.Application) -> web.UrlMappingMatchInfo:
        """Finds the request's route, so that it has an application."""
        match_info = await app.router.resolve(self)
        match_info.add_app(app)
        match_info.freeze()
        self._match_info = match_info
        return match_info


async def dispatch(
    app: web.Application, account: Account, path: str, body: bytes, request_id: str
) -> Reply:
    """Runs a request in the lowest priority class; errors become replies.

    The request counts against ``account``. The server's limit of a request's time applies, too.

    Args:
        app: the application.
        account: whom the request belongs to.
        path: the path of a route that answers POST and does work.
        body: the request's JSON, which asks for no stream and has no priority.
        request_id: its id in the log.
    """
    service = app[SERVICE]
    # The queue of the worker processes is fair between clients.
    CLIENT.set(account.name)
    REQUEST_ID.set(request_id)
    request = _LocalRequest(path, body)
    match_info = await request.resolve(app)
    request[ACCOUNT] = account
    request[REQUEST_ID_KEY] = request_id
    request[DEADLINE] = Deadline(service.settings.request_seconds)
    try:
        if service.drain.draining:
            raise Draining("the server is about to stop")
        account.take_request()
        response = await match_info.handler(request)
    except Exception as error:
        problem = problem_of(error)
        body = msgspec.json.encode(problem.reply())
        if problem.status in _TRANSIENT:
            return Reply(problem.status, body, float(problem.headers.get(hdrs.RETRY_AFTER, 1)))
        log_failure(problem.status, error)
        return Reply(problem.status, body)
    finally:
        release_model(request)
    assert isinstance(response, web.Response), "the request asks for no stream"
    assert isinstance(response.body, bytes)
    return Reply(response.status, response.body)
