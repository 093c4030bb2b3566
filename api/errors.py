"""The API's exceptions, and the one place that maps exceptions to HTTP errors.

Engine exceptions are in ``engine.errors``; ``problem_of`` maps both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import pydantic
from aiohttp import web

from chairlift.api.schemas.decoding import dotted
from chairlift.api.schemas.replies import ErrorDetail, ErrorReply
from chairlift.engine.errors import (
    AdapterError,
    ContextOverflow,
    EngineDead,
    Overflow,
    QueueFull,
    RequestError,
)

# How long a model loads or an engine is down is unknown, so clients should retry soon.
UNAVAILABLE_RETRY_SECONDS = 5


class UnknownModel(RequestError):
    """The request names a model that this server does not serve."""


class NotAllowed(RequestError):
    """The server's settings forbid what the request asks for."""


class UnsupportedEncoding(RequestError):
    """The body is compressed in a way that this server does not support."""


class UnknownResponse(RequestError):
    """The request names a stored response that does not exist or belongs to another client."""


class UnknownPrevious(RequestError):
    """``previous_response_id`` names a response that does not exist or is another client's."""


class UnknownItem(RequestError):
    """The request refers to an item that none of its client's stored responses contains."""


class UnknownFile(RequestError):
    """The request names a file that does not exist or belongs to another client."""


class UnknownBatch(RequestError):
    """The request names a batch that does not exist or belongs to another client."""


class FileTooLarge(RequestError):
    """An uploaded file is larger than this server takes."""


class StorageFull(RequestError):
    """The folder of files has reached one of its limits."""


class StorageUnavailable(OSError):
    """The folder of files cannot be used now: another server uses it, or the disk fails."""


class ContextExceeded(ContextOverflow):
    """Prompt and max_tokens together exceed the model's context."""


class NotReady(EngineDead):
    """The model is still loading, or the engine's steps have stopped.

    ``retry_after`` is in seconds.
    """

    def __init__(self, message: str, retry_after: float = UNAVAILABLE_RETRY_SECONDS) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelBusy(RequestError):
    """A model cannot be unloaded now, because requests use it."""


class Draining(EngineDead):
    """The server is stopping: it refuses a new request, or ends one that takes too long."""


class GenerationFailed(Exception):
    """The engine failed a request that it had accepted."""


class TimedOut(Exception):
    """The request exceeded its time limit."""


class Unauthorized(Exception):
    """The request needs an API key and has none, or an unknown one."""


class RateLimited(Exception):
    """The request's API key has reached a rate limit.

    Args:
        kind: "requests", "tokens" or "streams".
        limit: the limit in words.
        retry_after: seconds until the client should try again.
    """

    def __init__(self, kind: str, limit: str, retry_after: float) -> None:
        super().__init__(f"rate limit reached: this key may have {limit}")
        self.kind = kind
        self.retry_after = retry_after


class TooManyWatchers(Exception):
    """Too many status pages are open already."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it.

    Attributes:
        status: the HTTP status.
        message: one or two sentences for the client's developer.
        type: OpenAI's error type.
        param: the request field that is wrong, or None.
        code: OpenAI's error code, or None.
        headers: further headers of the reply.
        rejected: the reason in the metrics if the request was refused before generation, else None.
        overflow: the sizes of a prompt that is too long, else None.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    rejected: str | None = None
    overflow: Overflow | None = None

    def reply(self) -> ErrorReply:
        """OpenAI's JSON error object."""
        return ErrorReply(ErrorDetail(self.message, self.type, self.param, self.code))

    def response(self, reply: msgspec.Struct) -> web.Response:
        """The HTTP reply, with ``reply`` as its JSON body."""
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(reply),
            headers=self.headers,
            content_type="application/json",
        )


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """The format in which one API writes its errors; each route names its own.

    Attributes:
        schema: the type of the reply body, for the OpenAPI document.
        reply: makes the body from a problem and the request's id.
        id_header: another header that carries the request's id, besides ``X-Request-Id``.
    """

    schema: type[msgspec.Struct]
    reply: Callable[[Problem, str], msgspec.Struct]
    id_header: str | None = None


OPENAI_ERRORS = ErrorFormat(ErrorReply, lambda problem, request_id: problem.reply())


def problem_of(error: BaseException) -> Problem:
    """Maps an exception to what the client sees; an unknown one is a 500 without details."""
    match error:
        case RequestError():
            return _problem_of_request(error)
        case pydantic.ValidationError():
            return _problem_of_validation(error)
        case AdapterError():
            return Problem(400, str(error), param="lora_path", rejected="invalid")
        case Unauthorized():
            return Problem(
                401,
                str(error),
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
                rejected="unauthorized",
            )
        case QueueFull() | RateLimited() | TooManyWatchers():
            return _too_many(error)
        case GenerationFailed():
            return Problem(500, str(error), type="server_error", code="generation_failed")
        case StorageUnavailable():
            return Problem(503, str(error), type="server_error", code="storage_unavailable")
        case EngineDead():
            return _unavailable(error)
        case TimedOut():
            return Problem(504, str(error), type="timeout_error", code="timeout")
        case web.HTTPException():
            return _problem_of_http(error)
    return Problem(500, "internal error", type="server_error", code="internal_error")


def _problem_of_request(error: RequestError) -> Problem:
    text, param = str(error), error.param
    match error:
        case UnknownModel():
            return Problem(404, text, param=param, code="model_not_found")
        case NotAllowed():
            return Problem(403, text, code="not_allowed", rejected="invalid")
        case UnsupportedEncoding():
            return Problem(
                415,
                text,
                code="unsupported_encoding",
                headers={"Accept-Encoding": "gzip, deflate, identity"},
                rejected="invalid",
            )
        case UnknownResponse():
            return Problem(404, text, param=param, code="response_not_found")
        case UnknownPrevious():
            return Problem(400, text, param=param, code="previous_response_not_found")
        case UnknownItem():
            return Problem(404, text, param=param)
        case UnknownFile():
            return Problem(404, text, param=param, code="file_not_found")
        case UnknownBatch():
            return Problem(404, text, param=param, code="batch_not_found")
        case FileTooLarge():
            return Problem(413, text, param=param, code="file_too_large", rejected="too_large")
        case StorageFull():
            return Problem(400, text, code="storage_full", rejected="invalid")
        case ModelBusy():
            return Problem(409, text, code="model_busy")
        case ContextOverflow():
            return Problem(
                400,
                text,
                param=param,
                code="context_length_exceeded",
                rejected="context_length",
                overflow=error.overflow,
            )
    return Problem(400, text, param=param, rejected="invalid")


def _too_many(error: QueueFull | RateLimited | TooManyWatchers) -> Problem:
    match error:
        case QueueFull():
            return Problem(
                429,
                str(error),
                type="rate_limit_error",
                code="queue_full",
                headers=_retry_after(error.retry_after),
                rejected="queue_full",
            )
        case RateLimited():
            return Problem(
                429,
                str(error),
                type=error.kind,
                code="rate_limit_exceeded",
                headers=_retry_after(error.retry_after),
                rejected="rate_limit",
            )
        case TooManyWatchers():
            return Problem(429, str(error), type="rate_limit_error", code="too_many_watchers")


def _unavailable(error: EngineDead) -> Problem:
    code = "draining" if isinstance(error, Draining) else "unavailable"
    seconds = error.retry_after if isinstance(error, NotReady) else UNAVAILABLE_RETRY_SECONDS
    return Problem(
        503,
        str(error),
        type="server_error",
        code=code,
        headers=_retry_after(seconds),
        rejected=code,
    )


def _problem_of_validation(error: pydantic.ValidationError) -> Problem:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = dotted(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if param is not None:
        message = f"{param}: {message}"
    return Problem(400, message, param=param, rejected="invalid")


def _retry_after(seconds: float) -> Mapping[str, str]:
    """The header Retry-After, in seconds rounded up, at least 1."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _problem_of_http(error: web.HTTPException) -> Problem:
    match error.status:
        case 404:
            return Problem(404, "there is no such route", code="not_found")
        case 405:
            return Problem(
                405,
                "this route does not take that method",
                code="method_not_allowed",
                headers={"Allow": error.headers["Allow"]},
            )
        case 408:
            return Problem(408, "the request body took too long to arrive", code="body_timeout")
        case 413:
            return Problem(
                413, "the request body is too large", code="body_too_large", rejected="too_large"
            )
        case 415:
            return Problem(
                415, "the Content-Type must be application/json", code="unsupported_media_type"
            )
        case 417:
            return Problem(
                417, "this server knows no expectation but 100-continue", code="expectation_failed"
            )
        case 501:
            return Problem(
                501,
                "this server knows no Transfer-Encoding but chunked",
                code="unsupported_transfer_coding",
                rejected="malformed",
            )
    return Problem(error.status, error.reason)
