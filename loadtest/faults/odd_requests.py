"""Generates requests with extreme numbers from a seed: every limit of every field, also combined.

Most are valid. The others have one field just beyond its limits, which the refusal must name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chairlift.loadtest.faults import odd_values
from chairlift.loadtest.faults.odd_values import Odd
from chairlift.loadtest.random_schemas import random_schema

# Fractions of the requests with many odd fields.
_REFUSED = 0.15
_GRAMMAR = 0.25
_PRESENT = 0.4
_TOKENS = 4
_PATTERNS = ("ab", "x{2,9}", "[a-f]{4}", "(yes|no)", "[^\\\\n]*")


@dataclass(frozen=True, slots=True)
class OddRequest:
    """A body for a path. ``wrong`` names the field beyond its limits; None if all are valid."""

    path: str
    body: dict[str, Any]
    wrong: str | None = None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An endpoint, a valid body for it, and its fields with odd values."""

    path: str
    base: dict[str, Any]
    fields: tuple[Odd, ...]


def odd_requests(vocabulary: int, rows: int, seed: int) -> Iterator[OddRequest]:
    """Generates requests endlessly, alternating between one odd value and many.

    All single values of all endpoints come once, in random order, before any is repeated.

    Args:
        vocabulary: size of the model's vocabulary.
        rows: maximum choices of one request.
        seed: the seed of the random numbers.
    """
    draw = random.Random(seed)
    endpoints = _endpoints(vocabulary, rows)
    singles = [
        OddRequest(
            endpoint.path, {**endpoint.base, field.name: value}, field.name if wrong else None
        )
        for endpoint in endpoints
        for field in endpoint.fields
        for wrong, values in ((False, field.inside), (True, field.outside))
        for value in values
    ]
    while True:
        for single in draw.sample(singles, len(singles)):
            yield single
            yield _combined(draw, draw.choice(endpoints))


def _endpoints(vocabulary: int, rows: int) -> tuple[_Endpoint, ...]:
    conversation = [{"role": "user", "content": "hi"}]
    tokens = {"max_tokens": _TOKENS}
    return (
        _Endpoint(
            "/v1/completions",
            {"prompt": "hi", **tokens},
            odd_values.completions(vocabulary, rows),
        ),
        _Endpoint(
            "/v1/chat/completions",
            {"messages": conversation, "logprobs": True, **tokens},
            odd_values.chat(vocabulary, rows),
        ),
        _Endpoint(
            "/v1/responses",
            {"input": "hi", "store": False, "max_output_tokens": _TOKENS},
            odd_values.responses(vocabulary),
        ),
        _Endpoint(
            "/v1/messages", {"messages": conversation, **tokens}, odd_values.messages(vocabulary)
        ),
    )


def _combined(draw: random.Random, endpoint: _Endpoint) -> OddRequest:
    """A body with many odd values, and perhaps a grammar."""
    body = dict(endpoint.base)
    for field in endpoint.fields:
        if field.inside and draw.random() < _PRESENT:
            body[field.name] = draw.choice(field.inside)
    # Choices times prompts must fit the server's rows and queue.
    if "min_tokens" in body:
        body["min_tokens"] = draw.choice((0, body["max_tokens"]))
    if draw.random() < _GRAMMAR:
        body |= _grammar(draw, endpoint.path)
    wrong = None
    refusing = [field for field in endpoint.fields if field.outside]
    if draw.random() < _REFUSED:
        field = draw.choice(refusing)
        body[field.name] = draw.choice(field.outside)
        wrong = field.name
    return OddRequest(endpoint.path, body, wrong)


def _grammar(draw: random.Random, path: str) -> dict[str, Any]:
    schema = random_schema(draw)
    named = {"type": "json_schema", "name": "odd", "schema": schema}
    if path == "/v1/responses":
        return {"text": {"format": named}}
    if path == "/v1/messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    pattern = draw.choice(_PATTERNS)
    return draw.choice(
        (
            {"structured_outputs": {"regex": pattern}},
            {"structured_outputs": {"choice": ["yes", "no", ""]}},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json_object": True}},
            {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}},
            {"guided_regex": pattern},
            {"response_format": {"type": "json_schema", "json_schema": named}},
        )
    )
