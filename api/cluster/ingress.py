"""The ingress: an ASGI application that passes requests of all APIs to the replicas of their model.

It checks the API key and the size of the body, and reads only what routing needs. Everything else,
from validation to the key's limits, is the replica's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from chairlift.api.admission.accounts import Accounts
from chairlift.api.cluster.forwarding import (
    Backend,
    ForwardedRequest,
    Headers,
    ReplicaLost,
    ReplyHead,
    end_to_end,
)
from chairlift.api.cluster.merging import MERGED, Merge
from chairlift.api.cluster.prompts import Body, read_body
from chairlift.api.cluster.stream_errors import StreamTail
from chairlift.api.errors import ErrorFormat, NotReady, Problem, UnknownModel, problem_of
from chairlift.api.generate.answer import log_failure
from chairlift.api.http.encodings import decoded, encoding_of
from chairlift.api.server.routes import ROUTES, error_format_of
from chairlift.engine.errors import RequestError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# How often a request is tried before its reply has begun, and the pause before trying again.
_ATTEMPTS = 4
_RETRY_SECONDS = 0.2
_UNAVAILABLE = 503
_MODEL_CARD = "/v1/models/"
_FREE = {(route.method, route.path) for route in ROUTES if route.is_free}
_FREE |= {("GET", "/metrics"), ("GET", "/openapi.json")}
# State of one replica, which others do not know: stored responses, files, batches, loaded adapters,
# and whether the model is loaded.
_OF_ONE_REPLICA = re.compile(
    r"/v1/(responses/(?!input_tokens$|compact$).+|(files|batches)(/.*)?"
    r"|(un)?load_lora_adapter|models/.+/(un)?load)"
)
# Headers of a request that the replica gets in another form: its id, and its body, decoded.
_REPLACED = ("x-request-id", "content-encoding")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class _ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


class Ingress:
    """The ASGI application.

    Args:
        backends: the replicas of each model, by its name; the first one is the default.
        accounts: the accounts of the API keys.
        max_body_bytes: the maximum size of a request body.
    """

    def __init__(
        self, backends: Mapping[str, Backend], accounts: Accounts, max_body_bytes: int
    ) -> None:
        self._backends = dict(backends)
        self._accounts = accounts
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        named = dict(headers)
        given = named.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        reply = _Reply(path, error_format_of(path, named), request_id, send)
        try:
            await self._answer(scope, path, headers, receive, reply)
        except _ClientLeft:
            return
        except Exception as error:
            problem = problem_of(error)
            log_failure(problem.status, error)
            await reply.fail(problem)

    async def _answer(
        self, scope: Scope, path: str, headers: Headers, receive: Receive, reply: _Reply
    ) -> None:
        method = scope["method"]
        if (method, path) not in _FREE:
            self._accounts.account_for(CIMultiDict(headers))
        if _OF_ONE_REPLICA.fullmatch(path):
            raise RequestError(
                "a cluster keeps no responses, files or batches, and loads nothing on request; "
                "ask a single server"
            )
        if merge := MERGED.get((method, path)):
            await reply.send(*await self._merged(merge, method, path, headers))
            return
        body = await self._read(receive)
        if body and (encoding := encoding_of(_encodings(headers))):
            body = await decoded(body, encoding, self._max_body_bytes)
        fields = read_body(body)
        if fields.needs_state is not None:
            raise RequestError(
                f"{fields.needs_state}: a cluster keeps no responses; send the whole conversation",
                fields.needs_state,
            )
        backend = self._backend_for(path, fields)
        query = scope["query_string"].decode("latin-1")
        target = _raw_path(scope) + (f"?{query}" if query else "")
        passed_on = [pair for pair in end_to_end(headers) if pair[0].lower() not in _REPLACED]
        passed_on.append(("X-Request-Id", reply.request_id))
        request = ForwardedRequest(method, target, passed_on, body, fields.prompt_text())
        await _pass_on(backend, request, reply)

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, size)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _backend_for(self, path: str, fields: Body) -> Backend:
        """The replicas of the model that the request names.

        What follows a colon is Ollama's tag or an adapter's name, which the replica checks.

        Raises:
            UnknownModel: no model has that name.
        """
        name = fields.model_name
        if path.startswith(_MODEL_CARD):
            name = unquote(path.removeprefix(_MODEL_CARD))
        if name is None:
            return next(iter(self._backends.values()))
        for known in (name, name.rpartition(":")[0]):
            if known in self._backends:
                return self._backends[known]
        raise UnknownModel(f"the model {name[:200]!r} does not exist", "model")

    async def _merged(
        self, merge: Merge, method: str, path: str, headers: Headers
    ) -> tuple[ReplyHead, bytes]:
        request = ForwardedRequest(method, path, end_to_end(headers), b"", Body().prompt_text())
        replies = await asyncio.gather(
            *(_ask(backend, request, merge.seconds) for backend in self._backends.values())
        )
        return merge.combine(dict(zip(self._backends, replies, strict=True)))


def _encodings(headers: Headers) -> list[str]:
    return [value for name, value in headers if name.lower() == "content-encoding"]


class _Reply:
    """A reply to the client, which has not begun until the first piece of its body is there."""

    def __init__(self, path: str, errors: ErrorFormat, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self.has_begun = False
        self._path = path
        self._errors = errors
        self._send = send
        self._tail: StreamTail | None = None

    async def send(self, head: ReplyHead, body: bytes) -> None:
        """Sends a complete reply."""
        length = [("Content-Length", str(len(body)))]
        await self._begin(ReplyHead(head.status, [*head.headers, *length]))
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, head: ReplyHead, chunk: bytes) -> None:
        """Sends the next piece of a stream."""
        if not self.has_begun:
            self._tail = StreamTail(self._path, self._errors, head.header("content-type"))
            await self._begin(head)
        if self._tail is not None:
            self._tail.add(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        """Ends a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, problem: Problem) -> None:
        """Replies with an error, or ends a stream with one, in the format of the path's API."""
        if self._tail is not None:
            body = self._tail.failure(problem, self.request_id)
            await self._send({"type": "http.response.body", "body": body})
            return
        errors = self._errors
        headers = {"Content-Type": "application/json", **problem.headers}
        if errors.id_header is not None:
            headers[errors.id_header] = self.request_id
        body = msgspec.json.encode(errors.reply(problem, self.request_id))
        await self.send(ReplyHead(problem.status, list(headers.items())), body)

    async def _begin(self, head: ReplyHead) -> None:
        self.has_begun = True
        headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers
        ]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})


async def _pass_on(backend: Backend, request: ForwardedRequest, reply: _Reply) -> None:
    """Passes a request on, and tries again elsewhere if a replica is lost before its reply began.

    Trying again is safe: requests that change anything are not passed on.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if await _try(backend, request, reply, is_last=attempt == _ATTEMPTS):
                return
        except ReplicaLost as error:
            logger.warning("a replica was lost: %s", error)
            if reply.has_begun:
                raise NotReady("the replica was lost during the reply") from error
        await asyncio.sleep(_RETRY_SECONDS * attempt)
    raise NotReady("no replica could answer")


async def _try(backend: Backend, request: ForwardedRequest, reply: _Reply, is_last: bool) -> bool:
    """Passes a request on once; returns false if the replica cannot serve now and others may."""
    async with aclosing(backend.forward(request)) as pieces:
        head = await anext(pieces)
        assert isinstance(head, ReplyHead)
        if head.status == _UNAVAILABLE and not is_last:
            return False
        body: list[bytes] = []
        async for piece in pieces:
            assert isinstance(piece, bytes)
            if head.is_stream:
                await reply.stream(head, piece)
            else:
                body.append(piece)
    if reply.has_begun:
        await reply.finish()
    else:
        await reply.send(head, b"".join(body))
    return True


async def _ask(
    backend: Backend, request: ForwardedRequest, seconds: float
) -> tuple[int, bytes] | None:
    """The status and body of a short reply; None if no replica answers in time."""
    try:
        async with asyncio.timeout(seconds), aclosing(backend.forward(request)) as pieces:
            head = await anext(pieces)
            assert isinstance(head, ReplyHead)
            return head.status, b"".join([piece async for piece in pieces if type(piece) is bytes])
    except Exception as error:
        logger.warning("%s %s: no replica answers: %r", request.method, request.path, error)
        return None


def _raw_path(scope: Scope) -> str:
    """The path as the client encoded it, below the application's prefix."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
