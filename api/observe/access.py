"""The access log: one line a request, when it has ended, without anything its user wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from aiohttp.http_exceptions import HttpProcessingError

from chairlift.api.observe.request_record import RequestRecord

logger = logging.getLogger(__name__)
server_logger = logging.getLogger("aiohttp.server")

# Asked every few seconds by machines: their lines would hide the others.
POLLED = frozenset({"/health", "/ping", "/metrics"})


def log_request(record: RequestRecord) -> None:
    """Writes the line; the request's id comes from the context."""
    level = logging.DEBUG if record.route in POLLED else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "answered", extra=_fields(record))


def hide_bad_http() -> None:
    """Keeps requests that are not HTTP, with the bytes that were sent, out of aiohttp's log.

    They are answered with a 400 before they are anybody's request.
    """
    server_logger.addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
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
    """Of several prompts the slowest one's; None if none came that far."""
    return max((each for each in seconds if each is not None), default=None)
