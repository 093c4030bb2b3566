"""The adapter of each token of a model call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# The number of an adapter among the loaded ones; None: the base model alone.
Slot = int | None
Ids = NDArray[np.intp]

# So many tokens in a row with the same adapter are multiplied with its matrices alone. Fewer are
# multiplied with those of all adapters at once, and the products of the others are dropped.
LONG = 16
# Calls that are remembered: while no row joins or leaves, a batch's calls stay the same.
_CALLS = 32


class Run(NamedTuple):
    """Successive tokens of one adapter."""

    slot: Slot
    tokens: int


class Part(NamedTuple):
    """The tokens ``[start, stop)`` of a call; ``slots`` has one of each, or one for all of them."""

    start: int
    stop: int
    slots: tuple[Slot, ...]


class Groups(NamedTuple):
    """The tokens of some adapters, by adapter, each group padded to the length of the longest.

    Attributes:
        tokens: ``[adapters, longest]``, numbers of tokens.
        rows: ``[n]``, the tokens that have any of these adapters, ascending.
        places: ``[n]``, where each of ``rows`` is in the flat ``tokens``.
    """

    tokens: Ids
    rows: Ids
    places: Ids


class Call:
    """The adapters of one model call's tokens, in the order of its input."""

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        self.tokens = sum(run.tokens for run in runs)
        self.slots = frozenset(run.slot for run in runs if run.slot is not None)
        self._groups: dict[tuple[int, ...], Groups] = {}
        self._masks: dict[tuple[Any, ...], mx.array] = {}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tokens as long runs of one adapter, and what lies between them."""
        parts: list[Part] = []
        short: list[Slot] = []
        at = 0
        for slot, runs in groupby(self.runs, key=lambda run: run.slot):
            tokens = sum(run.tokens for run in runs)
            if tokens >= LONG or tokens == self.tokens:
                if short:
                    parts.append(Part(at - len(short), at, tuple(short)))
                    short = []
                parts.append(Part(at, at + tokens, (slot,)))
            else:
                short += [slot] * tokens
            at += tokens
        if short:
            parts.append(Part(at - len(short), at, tuple(short)))
        return tuple(parts)

    def mask(self, part: Part, slots: int, rank: int) -> mx.array:
        """Which columns of ``slots`` adapters belong to each token: ``[tokens, columns]``."""
        key = (part.start, slots, rank)
        if key not in self._masks:
            own = np.array([-1 if slot is None else slot for slot in part.slots])
            self._masks[key] = mx.array(own[:, None] == np.repeat(np.arange(slots), rank))
        return self._masks[key]

    def groups(self, slots: tuple[int, ...]) -> Groups:
        """The tokens of these adapters."""
        if slots not in self._groups:
            self._groups[slots] = self._grouped(slots)
        return self._groups[slots]

    def _grouped(self, slots: tuple[int, ...]) -> Groups:
        own = np.repeat(
            np.array([-1 if run.slot is None else run.slot for run in self.runs]),
            [run.tokens for run in self.runs],
        )
        members = [np.flatnonzero(own == slot) for slot in slots]
        longest = max(map(len, members))
        tokens = np.zeros((len(slots), longest), np.intp)
        places = []
        for number, member in enumerate(members):
            tokens[number, : len(member)] = member
            places.append(number * longest + np.arange(len(member)))
        rows = np.concatenate(members)
        order = np.argsort(rows)
        return Groups(tokens, rows[order], np.concatenate(places)[order])


class Routing:
    """The current model call's adapters, as the adapted layers see them.

    Attributes:
        call: the current call; None while there is none, or none of its tokens has an adapter.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self._call_of = lru_cache(_CALLS)(Call)

    @contextmanager
    def of(self, runs: Sequence[Run]) -> Iterator[None]:
        """A context for one model call whose input has these tokens, one run after the other."""
        if any(run.slot is not None for run in runs):
            self.call = self._call_of(tuple(runs))
        try:
            yield
        finally:
            self.call = None
