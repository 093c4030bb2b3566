"""The access log: one line for each ended request, without any text of the user."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import pydantic
from aiohttp.http_exceptions import HttpProcessingError

from chairlift.api.errors import problem_of
from chairlift.api.http.requests import CLIENT_LEFT
from chairlift.api.observe.page import EVENTS, PAGE_PATHS
from chairlift.api.observe.request_record import RequestRecord

logger = logging.getLogger(__name__)
server_logger = logging.getLogger("aiohttp.server")

# Machines poll these every few seconds; at INFO they would bury all other lines.
POLLED = frozenset({"/health", "/ping", "/metrics"})
# The page asks for these by itself.
PAGE_REQUESTS = PAGE_PATHS | {EVENTS}
# Characters of an error in the log.
MAX_REASON = 200
# NOTE: errors quote every text that is the client's; see ``reason_of``.
_QUOTED = re.compile(r"""(?:(?<=\W)|^)(['"`])(?:\\.|[^\\])*?(?:\1(?=\W|$)|$)""", re.DOTALL)


def log_request(record: RequestRecord, error: Exception | None = None) -> None:
    """Logs an ended request; the log's context adds its id.

    Args:
        error: the exception that the reply describes, if there was one.
    """
    # A closed page leaves its event stream.
    refused = record.status >= 400 and record.status != CLIENT_LEFT
    quiet = record.route in POLLED or (record.route in PAGE_REQUESTS and not refused)
    level = logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = _fields(record)
    if error is not None and 400 <= record.status < 500:
        fields["reason"] = reason_of(error)
    if record.status == CLIENT_LEFT:
        fields["reason"] = "the client left before the end of the reply"
    logger.log(level, "answered", extra=fields)


def reason_of(error: Exception) -> str:
    """The message that a client gets for ``error``, as one bounded line without any client's text.

    Quoted texts are left out, and so is what a library said about the request: the text of the
    exception that caused this one. Of a field's path only the first name stays, because the others
    can be a client's keys.
    """
    problem = problem_of(error)
    text = problem.message
    if isinstance(error, pydantic.ValidationError) and problem.param is not None:
        first = re.split(r"[.\[]", problem.param)[0]
        text = first + text.removeprefix(problem.param)
    cause = error.__cause__ or error.__context__
    if cause is not None and str(cause):
        text = text.replace(str(cause), type(cause).__name__)
    plain = " ".join(_QUOTED.sub("…", text).split())
    return plain if len(plain) <= MAX_REASON else plain[: MAX_REASON - 1] + "…"


def hide_bad_http() -> None:
    """Keeps malformed HTTP out of aiohttp's log, which would quote the client's bytes.

    aiohttp replies with status 400 before there is a request.
    """
    server_logger.addFilter(_is_no_bad_http)


def _is_no_bad_http(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _fields(record: RequestRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "seconds": record.seconds,
    }
    generation = record.generation
    if generation is not None:
        usage = generation.usage()
        fields |= {
            "completion_id": generation.id,
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "queue_seconds": _longest(times.queue for times in generation.times),
            "prefill_seconds": _longest(times.prefill for times in generation.times),
            "decode_seconds": _longest(times.decode for times in generation.times),
            "finish_reason": ",".join(dict.fromkeys(record.finish_reasons)) or None,
        }
    return {name: value for name, value in fields.items() if value is not None}


def _longest(seconds: Iterable[float | None]) -> float | None:
    """The longest time of a request's prompts; None if none reached that phase."""
    return max((each for each in seconds if each is not None), default=None)
