"""The body of POST /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from chairlift.api.schemas.fields import Metadata
from chairlift.api.schemas.request import Request

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
_UNITS = {"h": 3600, "d": 86400}
MAX_WINDOW_SECONDS = 30 * 86400


def window_seconds(window: str) -> int:
    """The seconds of a completion window like "24h" or "7d".

    Raises:
        ValueError: it has another form, or is not from an hour to 30 days.
    """
    number, unit = window[:-1], window[-1:]
    if number.isascii() and number.isdigit() and len(number) < 5 and unit in _UNITS:
        seconds = int(number) * _UNITS[unit]
        if 0 < seconds <= MAX_WINDOW_SECONDS:
            return seconds
    raise ValueError('must be a number of hours or days up to 30 days, like "24h" or "7d"')


def _checked(window: str) -> str:
    window_seconds(window)
    return window


class ExpiresAfter(Request):
    """The expiry of files: ``seconds`` after their creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class BatchRequest(Request):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Endpoint
    completion_window: Annotated[str, AfterValidator(_checked)]
    metadata: Metadata = {}
    output_expires_after: ExpiresAfter | None = None
