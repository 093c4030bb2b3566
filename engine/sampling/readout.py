"""Reads log-probabilities from the device into messages."""

from __future__ import annotations

from typing import Any

from chairlift.engine.messages import TokenLogprobs
from chairlift.engine.sampling.sampler import Logprobs


def read_logprobs(logprobs: Logprobs | None) -> dict[int, TokenLogprobs]:
    """The log-probabilities by row, each with as many alternatives as any row requests."""
    if logprobs is None:
        return {}
    chosen: Any = logprobs.values.chosen.tolist()
    ids: Any = logprobs.values.top_ids.tolist()
    values: Any = logprobs.values.top.tolist()
    return {
        row: TokenLogprobs(chosen[i], list(zip(ids[i], values[i], strict=True)))
        for i, row in enumerate(logprobs.rows)
    }


def cut(logprobs: TokenLogprobs, k: int) -> TokenLogprobs:
    """A copy with only the ``k`` most likely alternatives."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:k])
