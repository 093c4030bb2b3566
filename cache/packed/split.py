"""Layers that mix tokens, in a step that packs the tokens of several sequences.

A packed step is a model call with the tokens ``[tokens, 1]``. A recurrent layer has to see the
tokens of each sequence one after the other, so it is called once for each part of the step: with
the tokens of some rows, ``[rows, length]``, and a cache of these rows. ``engine.model.split``
makes these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.intp]
# A context for code that computes only some tokens of a model call, given their numbers.
Within = Callable[[Numbers], AbstractContextManager[None]]
# Computes the layer once more: with a cache, for the first tokens of some of its rows.
Again = Callable[[Any, Sequence[int], int], None]


def anywhere(tokens: Numbers) -> AbstractContextManager[None]:
    """The ``Within`` of code that does not depend on the tokens' numbers."""
    return nullcontext()


@dataclass(frozen=True)
class Places:
    """Where the tokens of a part are, in the step and in the part's own call.

    Attributes:
        start, stop: the part has the tokens ``[start, stop)`` of the step.
        rows, length: its own call has ``length`` tokens of each of so many rows.
        tokens: ``[rows * length]``, the number in the step of each token of the call; padding
            repeats another token.
        columns: ``[stop - start]``, the number in the call of each token; None: they are the same
            tokens in the same order.
    """

    start: int
    stop: int
    rows: int
    length: int
    tokens: Numbers
    columns: Numbers | None = None

    def picked(self, array: mx.array) -> mx.array:
        """The call's tokens, ``[rows * length, ...]``, of the step's ``[tokens, ...]``."""
        if self.columns is not None:
            return array[self._device_tokens]
        whole = (self.start, self.stop) == (0, array.shape[0])
        return array if whole else array[self.start : self.stop]

    def unpadded(self, array: mx.array) -> mx.array:
        """The part's tokens, ``[stop - start, ...]``, of the call's ``[rows * length, ...]``."""
        return array if self.columns is None else array[self._device_columns]

    def taken(self, array: mx.array) -> mx.array:
        """The call's tokens, ``[rows, length, ...]``, of the step's ``[tokens, 1, ...]``."""
        return self.picked(array).reshape(self.rows, self.length, *array.shape[2:])

    def restored(self, array: mx.array) -> mx.array:
        """The part's tokens, ``[stop - start, 1, ...]``, of the call's ``[rows, length, ...]``."""
        return self.unpadded(array.reshape(self.rows * self.length, 1, *array.shape[2:]))

    @cached_property
    def _device_tokens(self) -> mx.array:
        return mx.array(self.tokens)

    @cached_property
    def _device_columns(self) -> mx.array:
        assert self.columns is not None
        return mx.array(self.columns)


def places(start: int, counts: Sequence[int], rows: int | None = None) -> Places:
    """The places of rows that have so many of a step's tokens, one row after the other.

    Args:
        start: the number of the first one in the step.
        counts: the tokens of each row.
        rows: the rows of the call, if it has further ones, with padding only.
    """
    rows = len(counts) if rows is None else rows
    length = max(counts)
    ends = start + np.cumsum(counts)
    stop = int(ends[-1])
    if rows == len(counts) and min(counts) == length:
        return Places(start, stop, rows, length, np.arange(start, stop))
    column = np.arange(length)
    own = np.array([*counts, *[0] * (rows - len(counts))])
    begins = np.full(rows, start)
    begins[1 : len(counts)] = ends[:-1]
    taken = column < own[:, None]
    tokens = np.minimum(begins[:, None] + column, begins[:, None] + np.maximum(own[:, None], 1) - 1)
    return Places(start, stop, rows, length, tokens.reshape(-1), np.flatnonzero(taken))


class SplitPart(NamedTuple):
    """One call of a layer, with the tokens of some rows.

    Attributes:
        places: its tokens.
        cache: the rows' cache, behind mlx-lm's protocol.
        called: is called afterwards with a function that repeats the call; None: no one needs it.
    """

    places: Places
    cache: Any
    called: Callable[[Again], None] | None = None


class SplitLayer:
    """A layer's cache in a packed step, if the layer has to be called part by part.

    Args:
        parts: in the order of the tokens. Tokens that are in no part have zeros as a result.
        within: makes the ``Within`` of the model call that is running.
    """

    splits = True

    def __init__(
        self, parts: Sequence[SplitPart], within: Callable[[], Within] = lambda: anywhere
    ) -> None:
        self.parts = parts
        self.within = within

    def make_mask(self, n: int, *args: Any, **named: Any) -> None:
        """None: a recurrent layer's call has no mask, because no token of it is padding."""
