"""The inputs of a model call besides token ids: embeddings and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]


class TokenInputs(NamedTuple):
    """Successive tokens of one sequence in a model call.

    Attributes:
        tokens: their number, including padding.
        shift: their positions for the model, minus their places in the sequence: one number, or
            ``[axes, n]`` for the first n tokens.
        places: which of them are an image's.
        embeddings: ``[places, hidden size]``, in place of these tokens' own; None without places.
        together: which of them see each other, also those behind them.
    """

    tokens: int
    shift: int | Positions = 0
    places: Sequence[int] = ()
    embeddings: mx.array | None = None
    together: Sequence[range] = ()

    @property
    def is_plain(self) -> bool:
        """Whether these are a text's tokens at their own positions."""
        return not self.places and isinstance(self.shift, int) and self.shift == 0


# A context for model calls with these tokens, in the order of the flat input.
Given = Callable[[Sequence[TokenInputs]], AbstractContextManager[None]]


def no_inputs(inputs: Sequence[TokenInputs]) -> AbstractContextManager[None]:
    """The context of models that take tokens only."""
    return nullcontext()


def given_of(model: Any) -> Given:
    """The function that gives ``model`` its inputs besides token ids, for a vision model."""
    given: Given = getattr(model, "given", no_inputs)
    return given


def row_inputs(counts: Sequence[int], shifts: Sequence[int]) -> list[TokenInputs]:
    """The inputs of rows with ``counts`` tokens; ``shifts`` is empty if all are 0."""
    if not shifts:
        return [TokenInputs(sum(counts))]
    return [TokenInputs(*each) for each in zip(counts, shifts, strict=True)]


def shifts_of(inputs: Sequence[TokenInputs], axes: int) -> Positions:
    """The shifts of all tokens of a model call: ``[axes, tokens]``."""
    shifts = np.zeros((axes, sum(each.tokens for each in inputs)), np.int32)
    start = 0
    for each in inputs:
        length = each.tokens if isinstance(each.shift, int) else each.shift.shape[-1]
        shifts[:, start : start + length] = each.shift
        start += each.tokens
    return shifts


def places_of(inputs: Sequence[TokenInputs]) -> list[int]:
    """Which tokens of a model call are an image's, in the order of their embeddings."""
    places: list[int] = []
    start = 0
    for each in inputs:
        places += [start + place for place in each.places]
        start += each.tokens
    return places
