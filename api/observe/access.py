"""The access log: one line for each ended request, without any text of the user."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from aiohttp.http_exceptions import HttpProcessingError

from chairlift.api.observe.request_record import RequestRecord

logger = logging.getLogger(__name__)
server_logger = logging.getLogger("aiohttp.server")

# Machines poll these every few seconds; at INFO they would bury all other lines.
POLLED = frozenset({"/health", "/ping", "/metrics"})


def log_request(record: RequestRecord) -> None:
    """Logs an ended request; the log's context adds its id."""
    level = logging.DEBUG if record.route in POLLED else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "answered", extra=_fields(record))


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
