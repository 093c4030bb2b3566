"""The adapter of each token of a model call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.packed.split import Within, anywhere

# The number of an adapter among the loaded ones; None: the base model alone.
Slot = int | None
Ids = NDArray[np.intp]

# So many tokens in a row with the same adapter are multiplied with its matrices alone. Fewer are
# multiplied with those of all adapters at once, and the products of the others are dropped.
LONG = 16
# Calls that are remembered: while no row joins or leaves, a batch's calls stay the same.
_CALLS = 32


class AdapterRun(NamedTuple):
    """Successive tokens of one adapter."""

    slot: Slot
    tokens: int


class AdapterPart(NamedTuple):
    """The tokens ``[start, stop)`` of a call: ``mixed``, or all with the adapter ``slot``."""

    start: int
    stop: int
    slot: Slot = None
    mixed: bool = False


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


class Call(Protocol):
    """The adapters of one model call's tokens, in the order of its input.

    Attributes:
        tokens: their number.
        slots: the adapters that they may have.
        own: the slot of each token, -1 for none: ``[tokens]`` int32.
        parts: long runs of tokens of one adapter, and the tokens between them.
    """

    tokens: int
    slots: frozenset[int]

    @property
    def own(self) -> mx.array: ...

    @property
    def parts(self) -> tuple[AdapterPart, ...]: ...

    def mask(self, part: AdapterPart, slots: int, rank: int) -> mx.array:
        """Which columns of ``slots`` adapters belong to each token: ``[tokens, columns]``."""
        ...

    def of_tokens(self, numbers: Ids) -> Call:
        """The call of only these tokens."""
        ...

    def groups(self, slots: tuple[int, ...]) -> Groups:
        """The tokens of these adapters."""
        ...


class KnownCall:
    """A call whose adapters are known while its graph is built."""

    def __init__(self, runs: tuple[AdapterRun, ...]) -> None:
        self.runs = runs
        self.tokens = sum(run.tokens for run in runs)
        self.slots = frozenset(run.slot for run in runs if run.slot is not None)
        self._own = np.repeat(
            np.array([-1 if run.slot is None else run.slot for run in runs]),
            [run.tokens for run in runs],
        )
        self._groups: dict[tuple[int, ...], Groups] = {}
        self._masks: dict[tuple[Any, ...], mx.array] = {}

    @cached_property
    def own(self) -> mx.array:
        return mx.array(self._own, mx.int32)

    @cached_property
    def parts(self) -> tuple[AdapterPart, ...]:
        parts: list[AdapterPart] = []
        start = at = 0  # the tokens since ``start`` are in short runs
        for slot, runs in groupby(self.runs, key=lambda run: run.slot):
            tokens = sum(run.tokens for run in runs)
            stop = at + tokens
            if tokens >= LONG or tokens == self.tokens:
                if start < at:
                    parts.append(AdapterPart(start, at, mixed=True))
                parts.append(AdapterPart(at, stop, slot))
                start = stop
            at = stop
        if start < at:
            parts.append(AdapterPart(start, at, mixed=True))
        return tuple(parts)

    def mask(self, part: AdapterPart, slots: int, rank: int) -> mx.array:
        key = (part.start, slots, rank)
        if key not in self._masks:
            own = self._own[part.start : part.stop, None]
            self._masks[key] = mx.array(own == np.repeat(np.arange(slots), rank))
        return self._masks[key]

    def of_tokens(self, numbers: Ids) -> Call:
        slots = self._own[numbers].tolist()
        return KnownCall(tuple(AdapterRun(None if slot < 0 else slot, 1) for slot in slots))

    def groups(self, slots: tuple[int, ...]) -> Groups:
        if slots not in self._groups:
            self._groups[slots] = self._grouped(slots)
        return self._groups[slots]

    def _grouped(self, slots: tuple[int, ...]) -> Groups:
        members = [np.flatnonzero(self._own == slot) for slot in slots]
        longest = max(map(len, members))
        tokens = np.zeros((len(slots), longest), np.intp)
        places = []
        for number, member in enumerate(members):
            tokens[number, : len(member)] = member
            places.append(number * longest + np.arange(len(member)))
        rows = np.concatenate(members)
        order = np.argsort(rows)
        return Groups(tokens, rows[order], np.concatenate(places)[order])


class TracedCall:
    """A call that is compiled, in which any token may have any adapter.

    Args:
        own: the slot of each token, -1 for none: ``[tokens]`` int32.
        slots: the number of loaded adapters.
    """

    def __init__(self, own: mx.array, slots: int) -> None:
        self.tokens = own.size
        self.slots = frozenset(range(slots))
        self.own = own
        self.parts = (AdapterPart(0, self.tokens, mixed=True),)
        self._masks: dict[tuple[int, int], mx.array] = {}

    def mask(self, part: AdapterPart, slots: int, rank: int) -> mx.array:
        if (slots, rank) not in self._masks:
            columns = mx.array(np.repeat(np.arange(slots), rank), mx.int32)
            self._masks[slots, rank] = self.own[:, None] == columns
        return self._masks[slots, rank]

    def of_tokens(self, numbers: Ids) -> Call:
        return TracedCall(self.own[mx.array(numbers)], len(self.slots))

    def groups(self, slots: tuple[int, ...]) -> Groups:
        raise NotImplementedError("a compiled call is not computed on the host")


class Routing:
    """The current model call's adapters, as the adapted layers see them.

    Attributes:
        call: the current call; None while there is none, or none of its tokens has an adapter.
        slots: the number of loaded adapters.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self.slots = 0
        self._call_of = lru_cache(_CALLS)(KnownCall)
        self._on_change: list[Callable[[], None]] = []

    def on_change(self, call: Callable[[], None]) -> None:
        """Registers a function to call whenever adapters are loaded or unloaded."""
        self._on_change.append(call)

    def changed(self, slots: int) -> None:
        """Call this when other adapters are loaded; ``slots`` is their number."""
        self.slots = slots
        for call in self._on_change:
            call()

    @contextmanager
    def route(self, runs: Sequence[AdapterRun]) -> Iterator[None]:
        """A context for one model call whose input has these tokens, one run after the other."""
        if any(run.slot is not None for run in runs):
            self.call = self._call_of(tuple(runs))
        try:
            yield
        finally:
            self.call = None

    def within(self) -> Within:
        """A function that makes contexts for some tokens of the current model call."""
        call = self.call
        return anywhere if call is None else partial(self._within, call)

    @contextmanager
    def _within(self, call: Call, numbers: Ids) -> Iterator[None]:
        own = call.of_tokens(numbers)
        before, self.call = self.call, own if own.slots else None
        try:
            yield
        finally:
            self.call = before

    @contextmanager
    def traced(self, own: mx.array) -> Iterator[None]:
        """A context in which the current call is traced, with the slots as an argument.

        Args:
            own: see ``TracedCall``.
        """
        before, self.call = self.call, TracedCall(own, self.slots)
        try:
            yield
        finally:
            self.call = before
