"""Whether each row of a step got a token, told beside the tokens without a read of its own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from chairlift.engine.errors import RowFailed

# The largest float32: some device may begin a maximum with its negative, instead of -inf.
END = float(np.finfo(np.float32).max)
# What stands in a token's place; a real one is never below 0.
NONFINITE = -1
NO_CHOICE = -2

_FAILURES = {
    NONFINITE: (
        "nonfinite_logits",
        "the model gave logits that are not finite (NaN, +infinity, or nothing but -infinity)",
    ),
    NO_CHOICE: (
        "no_choice",
        "no token may come next: the model gives each token that the grammar allows a "
        "probability of zero",
    ),
}


def judged(tokens: mx.array, peak: mx.array, best: mx.array) -> mx.array:
    """The tokens of the rows that may have one, what has gone wrong for the others.

    A logit of -inf is a token that the model rules out; NaN, +inf and a row of nothing but -inf
    mean that its numbers have left the range of their type.

    Args:
        tokens: ``[rows]`` int32, chosen from logits that may be anything.
        peak: ``[rows]``, the highest of the model's own logits, NaN where there is a NaN.
        best: ``[rows]``, the highest after bias, penalties and mask.

    Returns:
        ``[rows]`` int32: tokens, NONFINITE or NO_CHOICE.
    """
    told = mx.where(mx.abs(best) < END, tokens, NO_CHOICE)
    return mx.where(mx.abs(peak) < END, told, NONFINITE)


def checked(told: int, vocabulary: int) -> int:
    """A token as it was read from the device.

    Raises:
        RowFailed: it is none of the vocabulary's.
    """
    if 0 <= told < vocabulary:
        return told
    reason, message = _FAILURES.get(
        told, ("bad_token", f"the device gave token {told}, and there are {vocabulary}")
    )
    raise RowFailed(message, reason)
