"""Log-probabilities off the device, as replies have them."""

from __future__ import annotations

from typing import Any

from chairlift.engine.messages import TokenLogprobs
from chairlift.engine.sampling.sampler import Logprobs


def read_logprobs(logprobs: Logprobs | None) -> dict[int, TokenLogprobs]:
    """By row, with as many alternatives as the request that asked for most."""
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
    """With no more alternatives than that."""
    return TokenLogprobs(logprobs.logprob, logprobs.top[:most])
