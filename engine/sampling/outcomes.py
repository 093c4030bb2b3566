"""Failure codes of rows. They are in the tokens' array, so that reading them costs nothing."""

from __future__ import annotations

import mlx.core as mx

from chairlift.engine.errors import RowFailed

# Failure codes in a token's place; token ids are never negative.
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


def soundness(raw: mx.array) -> tuple[mx.array, mx.array]:
    """Which rows are sound, and which have any possible token: ``[rows]`` booleans each.

    A sound row has no NaN and no +inf; a possible token has a logit above -inf.

    Args:
        raw: ``[rows, vocabulary]`` float32, the model's own logits.
    """
    return (raw < mx.inf).sum(axis=-1) == raw.shape[-1], (raw > -mx.inf).sum(axis=-1) > 0


def row_outcomes(
    tokens: mx.array, best: mx.array, sound: mx.array, any_possible: mx.array | None
) -> mx.array:
    """Replaces the tokens of failed rows by failure codes.

    A logit of -inf means that the model rules out the token. NaN, +inf, or only -inf mean that the
    model's numbers have overflowed.

    Args:
        tokens: ``[rows]`` int32, chosen from arbitrary logits.
        best: ``[rows]``, the highest logits after bias, penalties and mask.
        sound, any_possible: see ``soundness``. Without ``any_possible``, ``best`` says whether any
            token is possible; that is only right if nothing was masked.

    Returns:
        ``[rows]`` int32: tokens, NONFINITE or NO_CHOICE.
    """
    possible = mx.abs(best) < mx.inf
    any_possible = possible if any_possible is None else any_possible
    return mx.where(sound & any_possible, mx.where(possible, tokens, NO_CHOICE), NONFINITE)


def tokens_of(outcomes: list[int], vocabulary: int) -> list[int]:
    """The tokens of outcomes read from the device.

    Raises:
        RowFailed: an outcome is a failure code or outside the vocabulary.
    """
    for outcome in outcomes:
        if not 0 <= outcome < vocabulary:
            unknown = f"the device gave token {outcome}, and there are {vocabulary}"
            reason, message = _FAILURES.get(outcome, ("bad_token", unknown))
            raise RowFailed(message, reason)
    return outcomes
