"""Reads traces: the arrival times and lengths of requests."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

T = TypeVar("T", int, float)

# A trace beyond these has its times in another unit, or a wrong column.
_LONGEST_SECONDS = 10 * 366 * 86400.0
_LARGEST = 1e15
_MAX_TOKENS = 2**31 - 1


class TraceError(ValueError):
    """A file is not a valid trace; the text has the file and the line."""


class TraceRequest(NamedTuple):
    """A request of a trace.

    Attributes:
        arrival: seconds since the first request.
        prompt_tokens: length of the prompt.
        output_tokens: tokens after which the model ends the output.
        max_tokens: maximum output tokens that were requested.
        user: the user that sent it; fairness is measured over users.
        priority: its class; lower is more urgent.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    user: str = ""
    priority: int = 0


class TraceFormat(NamedTuple):
    """The columns of a kind of trace, and a function that converts its times to seconds."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def _timestamp(value: Any) -> float:
    """Converts a date and time to seconds, exact to six digits of a second's fraction."""
    date, _, fraction = str(value).partition(".")
    digits = fraction[: next((i for i, c in enumerate(fraction) if not c.isdigit()), None)]
    zone = fraction[len(digits) :]
    moment = datetime.fromisoformat(f"{date}.{digits[:6]:0<6}{zone}")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# The name of the column of arrivals tells the formats apart.
FORMATS = (
    # Our own format; only it has ``max_tokens``, ``user`` and ``priority``.
    TraceFormat("arrival", "prompt_tokens", "output_tokens", float),
    # Mooncake's, in milliseconds. Its ``hash_ids`` (shared prefixes) are not used.
    TraceFormat("timestamp", "input_length", "output_length", lambda value: float(value) / 1e3),
    # Azure's LLM inference traces.
    TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", _timestamp),
)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yields the requests of a file of JSON lines, or of CSV with a header, in a known format.

    The first request arrives at 0. The file is read lazily.

    Raises:
        TraceError: a line is not valid, or arrives before the line above it.
        OSError: the file cannot be read.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        start = last = None
        for number, row in _rows(path, file):
            try:
                request = _request(row)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            if last is not None and request.arrival < last:
                raise TraceError(f"{path}, line {number}: arrives before the one above; sort them")
            last = request.arrival
            start = last if start is None else start
            if last - start > _LONGEST_SECONDS:
                raise TraceError(
                    f"{path}, line {number}: arrives more than ten years after the first request"
                )
            yield request._replace(arrival=last - start)


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the number of each line and its values by column; skips empty lines."""
    skipped, first = next(
        ((number, line) for number, line in enumerate(file) if line.strip()), (0, "")
    )
    lines = chain([first], file)
    if not first.lstrip().startswith("{"):
        reader = csv.DictReader(lines)
        try:
            for row in reader:
                yield skipped + reader.line_num, row
        except csv.Error as error:
            raise TraceError(f"{path}, line {skipped + reader.line_num}: {error}") from error
        return
    for number, line in enumerate(lines, skipped + 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TraceError(f"{path}, line {number}: not a JSON object")
            yield number, row


def _request(row: Mapping[str, Any]) -> TraceRequest:
    kind = next((kind for kind in FORMATS if kind.time in row), None)
    if kind is None:
        known = ", ".join(kind.time for kind in FORMATS)
        raise ValueError(f"no column of arrivals, which would be one of {known}")
    output = _count(row, kind.output)
    max_tokens = _count(row, "max_tokens") if row.get("max_tokens") else output
    if max_tokens < output:
        raise ValueError(f"output of {output} tokens, but max_tokens is {max_tokens}")
    prompt = _count(row, kind.prompt)
    arrival = _value(row, kind.time, kind.seconds, "a time")
    priority = _value(row, "priority", int, "a whole number") if row.get("priority") else 0
    user = str(row.get("user") or "")
    return TraceRequest(arrival, prompt, output, max_tokens, user, priority)


def _value(row: Mapping[str, Any], column: str, read: Callable[[Any], T], what: str) -> T:
    try:
        value = read(row[column])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{column} must be {what}, not {row[column]!r}") from error
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{column} must be {what}, not {row[column]!r}")
    return value


def _count(row: Mapping[str, Any], column: str) -> int:
    """Reads a number of tokens.

    Raises:
        ValueError: the column is missing, or is not a whole number from 1 to ``_MAX_TOKENS``.
    """
    value = row.get(column)
    if value is None:
        raise ValueError(f"no {column}")
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if not 1 <= count <= _MAX_TOKENS or isinstance(value, float | bool):
        shown = repr(value)[:100]
        raise ValueError(f"{column} must be a whole number from 1 to {_MAX_TOKENS}, not {shown}")
    return count
