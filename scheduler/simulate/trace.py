"""Requests as a trace has them: when they arrive, and how long they are."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

T = TypeVar("T", int, float)


class TraceError(ValueError):
    """A file is no trace; the text has the file and the line."""


class Request(NamedTuple):
    """``arrival`` is in seconds from the beginning, lengths are in tokens.

    The model ends its output after ``output_tokens``; up to ``max_tokens`` were asked for. Of
    ``priority`` the lower is the more urgent. ``user`` is whoever fairness is owed to.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    user: str = ""
    priority: int = 0


class TraceFormat(NamedTuple):
    """The columns that a kind of trace has, and how many seconds its time column tells."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def _timestamp(value: Any) -> float:
    """Seconds of a date and time; of its fractions of a second six digits count."""
    date, _, fraction = str(value).partition(".")
    digits = fraction[: next((i for i, c in enumerate(fraction) if not c.isdigit()), None)]
    zone = fraction[len(digits) :]
    moment = datetime.fromisoformat(f"{date}.{digits[:6]:0<6}{zone}")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# What the column of arrivals is called tells the formats apart.
FORMATS = (
    # Our own, which alone knows ``max_tokens``, ``user`` and ``priority``.
    TraceFormat("arrival", "prompt_tokens", "output_tokens", float),
    # Mooncake's, in milliseconds. Its ``hash_ids``, who shares a prefix with whom, are not used.
    TraceFormat("timestamp", "input_length", "output_length", lambda value: float(value) / 1e3),
    # Azure's LLM inference traces.
    TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", _timestamp),
)


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a file of JSON lines, or of CSV with a header, in one of ``FORMATS``.

    The first one arrives at 0. The file is read as it is needed.

    Raises:
        TraceError: a line that makes no sense, with its number, or one that arrives before the one
            above it.
        OSError: the file cannot be read.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
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
            yield request._replace(arrival=last - start)


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows by column, and the numbers of their lines; empty lines are passed over."""
    first = file.readline()
    lines = chain([first], file)
    if not first.lstrip().startswith("{"):
        reader = csv.DictReader(lines)
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from error
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TraceError(f"{path}, line {number}: not a JSON object")
            yield number, row


def _request(row: Mapping[str, Any]) -> Request:
    kind = next((kind for kind in FORMATS if kind.time in row), None)
    if kind is None:
        known = ", ".join(kind.time for kind in FORMATS)
        raise ValueError(f"no column of arrivals, which would be one of {known}")
    output = _count(row, kind.output)
    most = _count(row, "max_tokens") if row.get("max_tokens") else output
    if most < output:
        raise ValueError(f"output of {output} tokens, but max_tokens is {most}")
    prompt = _count(row, kind.prompt)
    arrival = _value(row, kind.time, kind.seconds, "a time")
    priority = _value(row, "priority", int, "a whole number") if row.get("priority") else 0
    return Request(arrival, prompt, output, most, str(row.get("user") or ""), priority)


def _value(row: Mapping[str, Any], column: str, read: Callable[[Any], T], what: str) -> T:
    try:
        value = read(row[column])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{column} must be {what}, not {row[column]!r}") from error
    if not math.isfinite(value):
        raise ValueError(f"{column} must be {what}, not {row[column]!r}")
    return value


def _count(row: Mapping[str, Any], column: str) -> int:
    """A number of tokens.

    Raises:
        ValueError: the column is missing, or has none.
    """
    value = row.get(column)
    if value is None:
        raise ValueError(f"no {column}")
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(value, float | bool):
        raise ValueError(f"{column} must be a whole number above 0, not {value!r}")
    return count
