"""Log-probabilities of given tokens and of the k likely ones, computed from logits."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from chairlift.engine.sampling.host_draw import host_log_totals
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
        logits: ``[m, vocabulary]`` of any float type.
        tokens: ``[m]``.
    """
    logits = logits.astype(mx.float32)
    highest = logits.max(axis=-1, keepdims=True)
    total = _log_totals(logits, highest)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if k <= 1:
        best = mx.argmax(logits, axis=-1, keepdims=True)[:, :k]
        return TopLogprobs(chosen[:, 0], best, (highest - total)[:, :k])
    best, top = largest(logits, k)
    return TopLogprobs(chosen[:, 0], best, top - total)


def _log_totals(logits: mx.array, highest: mx.array) -> mx.array:
    """The logarithm of each row's sum of exponentials, ``[m, 1]``, from its highest logit."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return host_log_totals(logits, highest)
    return lazy_log_totals(logits, highest)


def lazy_log_totals(logits: mx.array, highest: mx.array) -> mx.array:
    """As ``_log_totals``, by operations that any device has."""
    return highest + mx.log(exp(logits - highest).sum(axis=-1, keepdims=True))


def top_logprobs_in_slices(logits: mx.array, tokens: mx.array, k: int) -> TopLogprobs:
    """As ``top_logprobs``, but slice by slice, which needs extra memory for one slice only."""
    slices = range(0, logits.shape[0], SLICE)
    parts = [top_logprobs(logits[i : i + SLICE], tokens[i : i + SLICE], k) for i in slices]
    return TopLogprobs(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))
