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
    """The places of a part's tokens, in the step and in the part's own call.

    Attributes:
        rows, length: the shape of its own call.
        tokens: ``[rows * length]``, the number in the step of each token of the call; padding
            repeats another token.
        columns: the numbers in the call of the tokens that are no padding; None: all.
    """

    rows: int
    length: int
    tokens: Numbers
    columns: Numbers | None = None

    @cached_property
    def numbers(self) -> Numbers:
        """The numbers in the step of the part's tokens, in the order of the call."""
        return self.tokens if self.columns is None else self.tokens[self.columns]

    @cached_property
    def span(self) -> slice | None:
        """The range of ``tokens``, if they are one."""
        return _range(self.tokens)

    @cached_property
    def own(self) -> slice | None:
        """The range of ``columns``, if they are one."""
        return slice(0, len(self.tokens)) if self.columns is None else _range(self.columns)

    def picked(self, array: mx.array) -> mx.array:
        """The call's tokens, ``[rows * length, ...]``, of the step's ``[tokens, ...]``."""
        if self.span is None:
            return array[self._device_tokens]
        return array if self.span == slice(0, array.shape[0]) else array[self.span]

    def is_all(self, tokens: int) -> bool:
        """Whether the call has all ``tokens`` of a step, in their order, and no others."""
        return self.columns is None and self.span == slice(0, tokens)

    def unpadded(self, array: mx.array) -> mx.array:
        """The part's tokens, ``[tokens, ...]``, of the call's ``[rows * length, ...]``."""
        if self.columns is None:
            return array
        return array[self._device_columns if self.own is None else self.own]

    def taken(self, array: mx.array) -> mx.array:
        """The call's tokens, ``[rows, length, ...]``, of the step's ``[tokens, 1, ...]``."""
        return self.picked(array).reshape(self.rows, self.length, *array.shape[2:])

    def restored(self, array: mx.array) -> mx.array:
        """The part's tokens, ``[tokens, 1, ...]``, of the call's ``[rows, length, ...]``."""
        return self.unpadded(array.reshape(self.rows * self.length, 1, *array.shape[2:]))

    @cached_property
    def _device_tokens(self) -> mx.array:
        return mx.array(self.tokens)

    @cached_property
    def _device_columns(self) -> mx.array:
        assert self.columns is not None
        return mx.array(self.columns)


def _range(numbers: Numbers) -> slice | None:
    first = int(numbers[0])
    ascending = (np.diff(numbers) == 1).all()
    return slice(first, first + len(numbers)) if ascending else None


def places(
    begins: Sequence[int], counts: Sequence[int], rows: int | None = None, tokens: int = 0
) -> Places:
    """The places of rows that have consecutive tokens of a step.

    Args:
        begins: the number of each row's first token.
        counts: the tokens of each row; 0 is allowed, but not for all.
        rows: the rows of the call, if it has further ones, with padding only.
        tokens: all tokens of the step, which may serve as padding.
    """
    rows = len(counts) if rows is None else rows
    own = np.zeros((2, rows), np.intp)
    own[:, : len(counts)] = begins, counts
    stop = begins[-1] + counts[-1]
    if stop + rows - len(counts) <= tokens:
        # The tokens behind those of the rows: a range takes no copy.
        own[0, len(counts) :] = np.arange(stop, stop + rows - len(counts)) + 1
    first, count = own[:, :, None]
    column = np.arange(max(counts))
    # A row without tokens repeats the one before its own place.
    numbers = np.maximum(first + np.minimum(column, count - 1), 0)
    taken = column < count
    columns = None if taken.all() else np.flatnonzero(taken)
    return Places(rows, len(column), numbers.reshape(-1), columns)


class Joint:
    """Joins the results of all parts to those of the step's tokens.

    Args:
        parts: each part's tokens.
        tokens: the tokens of the step. Those that are in no part get zeros.
    """

    def __init__(self, parts: Sequence[Places], tokens: int) -> None:
        numbers = np.concatenate([part.numbers for part in parts])
        self._order: mx.array | None = None
        self._tail = 0
        if (numbers == np.arange(len(numbers))).all():
            self._tail = tokens - len(numbers)
        else:
            self._tail = int(len(numbers) < tokens)
            order = np.full(tokens, len(numbers))
            order[numbers] = np.arange(len(numbers))
            self._order = mx.array(order)

    def joined(self, *results: mx.array) -> mx.array:
        """``[tokens, 1, ...]`` from the result ``[part's tokens, 1, ...]`` of each part."""
        like = results[0]
        tail = [mx.zeros((self._tail, *like.shape[1:]), like.dtype)] if self._tail else []
        whole = mx.concatenate([*results, *tail]) if len(results) + len(tail) > 1 else like
        return whole if self._order is None else whole[self._order]


class SplitPart(NamedTuple):
    """One call of a layer, with the tokens of some rows.

    Attributes:
        places: its tokens.
        cache: the rows' cache, behind mlx-lm's protocol.
        mask: the mask of the call.
        called: is called afterwards with a function that repeats the call; None: nothing needs it.
    """

    places: Places
    cache: Any
    mask: Any = None
    called: Callable[[Again], None] | None = None


class PackedMask(NamedTuple):
    """The masks of all parts of a step; a model only passes it on."""

    masks: Sequence[Any]


class SplitLayer:
    """A layer's cache in a packed step, if the layer has to be called part by part.

    Args:
        parts: one call each.
        joint: joins their results.
        within: makes the ``Within`` of the model call that is running.
        launches: each part is launched once it is called. Then the operations of a call have the
            same graph whatever the other parts of a step are; CUDA keeps the graphs that it has
            built, and a new one takes milliseconds.
    """

    splits = True

    def __init__(
        self,
        parts: Sequence[SplitPart],
        joint: Joint,
        within: Callable[[], Within] = lambda: anywhere,
        launches: bool = False,
    ) -> None:
        self.parts = parts
        self.joint = joint
        self.within = within
        self.launches = launches

    def make_mask(self, n: int, *args: Any, **named: Any) -> PackedMask | None:
        """The masks; None if no part has one."""
        masks = [part.mask for part in self.parts]
        return None if all(mask is None for mask in masks) else PackedMask(masks)
