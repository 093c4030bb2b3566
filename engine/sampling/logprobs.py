"""Log-probabilities of given tokens and of the k likely ones, computed from logits."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.compiled.compiled_sampling import highest
from chairlift.engine.cpu.views import view
from chairlift.engine.sampling.choice import host_samples
from chairlift.engine.sampling.host.logprobs import host_logprobs
from chairlift.engine.sampling.math import exp
from chairlift.engine.sampling.top import largest

# Positions converted at once: a prompt's logits may be hundreds of megabytes.
SLICE = 64


class TopLogprobs(NamedTuple):
    """Log-probabilities (float32) at m positions.

    Attributes:
        chosen: ``[m]``, those of the given tokens.
        top_ids: ``[m, k]``, the k most likely tokens, best first.
        top: ``[m, k]``, the log-probabilities of ``top_ids``.
    """

    chosen: mx.array
    top_ids: mx.array
    top: mx.array


def top_logprobs(logits: mx.array, tokens: mx.array, k: int) -> TopLogprobs:
    """The model's log-probabilities of one token per position, and of the ``k`` most likely ones.

    Args:
        logits: ``[m, vocabulary]`` of any float type. On a CPU they are evaluated.
        tokens: ``[m]``.
        k: from 0 to ``vocabulary``.

    Returns:
        NaN where a position's logits are not finite, that is, have NaN, +inf, or only -inf.
    """
    if not host_samples():
        return lazy_top_logprobs(logits, tokens, k)
    lines = np.ascontiguousarray(view(logits.astype(mx.float32)))
    given = view(tokens).astype(np.int64)
    rows = np.arange(len(lines))
    return TopLogprobs(*map(mx.array, host_logprobs(lines, rows, highest(lines, rows), given, k)))


def lazy_top_logprobs(logits: mx.array, tokens: mx.array, k: int) -> TopLogprobs:
    """As ``top_logprobs``, by operations that any device has; nothing is evaluated."""
    logits = logits.astype(mx.float32)
    highest = logits.max(axis=-1, keepdims=True)
    # Subtract the highest logit first: its sum with a small logarithm would lose digits.
    log = mx.log(exp(logits - highest).sum(axis=-1, keepdims=True))
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - highest - log
    if k <= 1:
        best = mx.argmax(logits, axis=-1, keepdims=True)[:, :k]
        return TopLogprobs(chosen[:, 0], best, (highest - highest - log)[:, :k])
    best, top = largest(logits, k)
    return TopLogprobs(chosen[:, 0], best, top - highest - log)


def top_logprobs_in_slices(logits: mx.array, tokens: mx.array, k: int) -> TopLogprobs:
    """As ``top_logprobs``, but slice by slice, which needs extra memory for one slice only."""
    slices = range(0, logits.shape[0], SLICE)
    parts = [top_logprobs(logits[i : i + SLICE], tokens[i : i + SLICE], k) for i in slices]
    return TopLogprobs(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))
