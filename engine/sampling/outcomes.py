"""Whether each row of a step got a token, told beside the tokens without a read of its own."""

from __future__ import annotations

import mlx.core as mx

from chairlift.engine.errors import RowFailed

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


def row_outcomes(tokens: mx.array, best: mx.array, raw: mx.array, masked: bool) -> mx.array:
    """The tokens of the rows that may have one, what has gone wrong for the others.

    A logit of -inf is a token that the model rules out; NaN, +inf and a row of nothing but -inf
    mean that its numbers have left the range of their type.

    Args:
        tokens: ``[rows]`` int32, chosen from logits that may be anything.
        best: ``[rows]``, the highest logits after bias, penalties and mask.
        raw: ``[rows, vocabulary]`` float32, the model's own logits.
        masked: whether a mask may have left nothing of a row whose logits are finite.

    Returns:
        ``[rows]`` int32: tokens, NONFINITE or NO_CHOICE.
    """
    # NOTE: sums of booleans; MLX's maximum, which would do for both, takes ten times as long on the
    # CPU as it looks for NaN.
    sound = (raw < mx.inf).sum(axis=-1) == raw.shape[-1]
    possible = mx.abs(best) < mx.inf
    some = (raw > -mx.inf).sum(axis=-1) > 0 if masked else possible
    return mx.where(sound & some, mx.where(possible, tokens, NO_CHOICE), NONFINITE)


def token_of(outcome: int, vocabulary: int) -> int:
    """A token as it was read from the device.

    Raises:
        RowFailed: it is none of the vocabulary's.
    """
    if 0 <= outcome < vocabulary:
        return outcome
    reason, message = _FAILURES.get(
        outcome, ("bad_token", f"the device gave token {outcome}, and there are {vocabulary}")
    )
    raise RowFailed(message, reason)
