"""The tokens that a batch has used, from its results."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from chairlift.api.openai.batches.replies import BatchUsage


class _Details(Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(Struct):
    """The usage of any endpoint: /v1/responses has other names than the older ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = field(default_factory=_Details)
    completion_tokens_details: _Details = field(default_factory=_Details)
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details = field(default_factory=_Details)
    output_tokens_details: _Details = field(default_factory=_Details)


class _Body(Struct):
    usage: _Usage | None = None


class _Response(Struct):
    body: _Body


class _Result(Struct):
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Result).decode


def add_usage(total: BatchUsage, line: bytes) -> None:
    """Adds the usage of a line of the output file to ``total``."""
    response = _decode(line).response
    usage = None if response is None else response.body.usage
    if usage is None:
        return
    total.input_tokens += usage.prompt_tokens + usage.input_tokens
    total.output_tokens += usage.completion_tokens + usage.output_tokens
    total.total_tokens = total.input_tokens + total.output_tokens
    for details in (usage.prompt_tokens_details, usage.input_tokens_details):
        total.input_tokens_details.cached_tokens += details.cached_tokens
    for details in (usage.completion_tokens_details, usage.output_tokens_details):
        total.output_tokens_details.reasoning_tokens += details.reasoning_tokens
