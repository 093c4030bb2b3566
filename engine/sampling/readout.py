"""Copies log-probabilities from the device into the form of replies."""

from __future__ import annotations

from typing import Any

from chairlift.engine.messages import TokenLogprobs
from chairlift.engine.sampling.sampler import Logprobs


def read_logprobs(logprobs: Logprobs | None) -> dict[int, TokenLogprobs]:
    """By row, each with the largest number of alternatives that any row requested."""
    if logprobs is None:
        return {}
    chosen: Any = logprobs.values.chosen.tolist()
    ids: Any = logprobs.values.top_ids.tolist()
    values: Any = logprobs.values.top.tolist()
    return {
        row: TokenLogprobs(chosen[i], list(zip(ids[i], values[i], strict=True)))
        for i, row in enumerate(logprobs.rows)
    }


def cut(logprobs: TokenLogprobs, most: int) -> TokenLogprobs:
    """The same with at most ``most`` alternatives."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:most])
