"""Speculative decoding's transactions: tokens are written first, then each row keeps some of them.

A transaction is one or more steps, then a commit or a discard::

    speculation = Speculation(batch)
    with speculation.step(length):
        logits = model(tokens, cache=speculation.layers)  # tokens: [rows, length]
    speculation.commit([3, 0, length])  # how many of its tokens each row keeps, the first ones

Attention layers write into their rings at once. A window is enlarged by the tentative tokens, so
that nothing is overwritten that a query could still see. Rejected columns are not erased: each
row's cursor moves back over its own, so a commit copies nothing.

A recurrent state can only be reset to a checkpoint: the start of the transaction and the end of
each of its steps. For a row to keep any other number of tokens, its tokens have to be replayed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.layer import LayerCache
from chairlift.cache.state import Slots, StateLayer

# Feeds the model the tokens [start, stop) of the transaction, all rows, with Speculation.layers.
Replay = Callable[[int, int], object]


class SpeculationError(Exception):
    """A transaction cannot begin, or the call does not fit its current state."""


class NeedsReplay(SpeculationError):
    """The rows ``rows`` keep a number of tokens at which there is no recurrent checkpoint."""

    def __init__(self, rows: Sequence[int], stops: Sequence[int]) -> None:
        super().__init__(f"states of rows {list(rows)} were kept only after {list(stops)} tokens")
        self.rows = list(rows)


class Speculation:
    """Consecutive transactions on all rows of a batch.

    Rows may join and leave between transactions, not within one. An exception raised here leaves
    the batch and the transaction unchanged.

    Args:
        batch: the batch that speculates; no row may have padding after its last token.
        isolated: work on a copy (``batch``) and never touch the given batch, to check what a
            transaction does.

    Raises:
        SpeculationError: a layer's kind does not support it (it is named), or a row has ended.
    """

    def __init__(self, batch: BatchCache, isolated: bool = False) -> None:
        for layer in batch.parts:
            if not isinstance(layer, LayerCache | StateLayer):
                raise SpeculationError(f"{type(layer).__name__} cannot take tokens back")
        _check_open_ended(batch)
        self.batch = _copied(batch) if isolated else batch
        self._states = [part for part in self.batch.parts if isinstance(part, StateLayer)]
        # Checkpoints by tokens of the transaction written so far; empty outside a transaction.
        self._checkpoints: dict[int, list[Slots]] = {}
        # After the last step: the tokens that each row may keep, and its offset.
        self._writable: list[int] = []
        self._offsets: list[int] = []

    @property
    def layers(self) -> Sequence[Any]:
        """The cache to pass to the model."""
        return self.batch.layers

    @property
    def written(self) -> int:
        """Tokens of each row that await a commit, padding included; 0 outside a transaction."""
        return max(self._checkpoints, default=0)

    @contextmanager
    def step(self, length: int, real: Sequence[int] | None = None) -> Iterator[None]:
        """Context of a model call in which every row takes ``length`` tentative tokens.

        The first step begins a transaction, later ones continue it. In the last one, ``real`` is
        the number of actual tokens of each row; the rest is padding, which no row can keep. If the
        call fails, the step is undone.

        Raises:
            SpeculationError: no tokens, a row has ended, rows joined or left within the
                transaction, or padding would enter a state.
        """
        counts = [length] * len(self.batch) if real is None else list(real)
        self._check_step(length, counts)
        written = self.written
        if not written:
            for layer in self.batch.attention:
                layer.begin_transaction()
        checkpoints = self._checkpoints or {0: self._checkpoint()}
        # One column more than the step needs: a window is extracted with ``window`` tokens.
        capacity = Capacity(len(self.batch), self.batch.tokens + length)
        self.batch.reserve(capacity, step=written + length + 1)
        try:
            with self.batch.step(length, counts):
                yield
        except BaseException:
            self.batch.forget(length)
            self._restore(checkpoints, [written] * len(self.batch))
            raise
        self._checkpoints = checkpoints | {written + length: self._checkpoint()}
        self._writable = [written + new for new in counts]
        self._offsets = list(self.batch.offsets)

    def commit(self, accepted: Sequence[int], replay: Replay | None = None) -> None:
        """Keeps the first ``accepted[r]`` tokens that row ``r`` wrote and removes the others.

        If there is no checkpoint at some of these numbers, the transaction is undone and ``replay``
        is called for the tokens up to each number in turn; rows that keep fewer are fed the rest as
        well and then reset. If ``replay`` fails, the transaction is discarded.

        Raises:
            SpeculationError: nothing was written since the last commit, there is not one number per
                row, a number exceeds what its row wrote, or rows joined or left in between.
            NeedsReplay: a replay is necessary, and ``replay`` is None.
        """
        self._check_commit(accepted)
        uncut = [r for r, kept in enumerate(accepted) if kept not in self._checkpoints]
        if self._states and uncut:
            if replay is None:
                raise NeedsReplay(uncut, sorted(self._checkpoints))
            self._replay(accepted, replay)
        self._take_back(accepted)

    def discard(self) -> None:
        """Removes everything that the transaction wrote.

        Raises:
            SpeculationError: nothing was written since the last commit, or rows joined or left.
        """
        self._check_current()
        self._take_back([0] * len(self.batch))

    def _take_back(self, accepted: Sequence[int]) -> None:
        self.batch.take_back(self.written, accepted)
        self._restore(self._checkpoints, accepted)
        self._checkpoints = {}

    def _replay(self, accepted: Sequence[int], replay: Replay) -> None:
        self.discard()
        try:
            for start, stop in itertools.pairwise(sorted({0, *accepted})):
                with self.step(stop - start):
                    replay(start, stop)
        except BaseException:
            if self._checkpoints:
                self.discard()
            raise

    def _checkpoint(self) -> list[Slots]:
        return [state.checkpoint() for state in self._states]

    def _restore(self, checkpoints: dict[int, list[Slots]], kept: Sequence[int]) -> None:
        for i, state in enumerate(self._states):
            state.reset_rows({stop: slots[i] for stop, slots in checkpoints.items()}, kept)

    def _check_step(self, length: int, counts: Sequence[int]) -> None:
        if self._checkpoints:
            self._check_current()
        _check_open_ended(self.batch)
        rows = len(self.batch)
        if length < 1 or len(counts) != rows or not all(0 <= n <= length for n in counts):
            raise SpeculationError(f"rows {rows} cannot take {counts} of {length} tokens")
        if not self.batch.pads and any(n < length for n in counts):
            raise SpeculationError("padding would enter a recurrent state")

    def _check_commit(self, accepted: Sequence[int]) -> None:
        self._check_current()
        if len(accepted) != len(self._writable):
            raise SpeculationError(f"{len(accepted)} numbers for {len(self._writable)} rows")
        for row, (kept, written) in enumerate(zip(accepted, self._writable, strict=True)):
            if not 0 <= kept <= written:
                raise SpeculationError(f"row {row} wrote {written} tokens and cannot keep {kept}")

    def _check_current(self) -> None:
        if not self._checkpoints:
            raise SpeculationError("nothing was written since the last commit")
        if self.batch.offsets != self._offsets:
            raise SpeculationError("the batch has gone on without the transaction")


def _copied(batch: BatchCache) -> BatchCache:
    """A copy with buffers of its own."""
    copied = copy.deepcopy(batch)
    # A deep copy of an MLX array shares its memory, into which ``LayerCache.host_places`` points.
    for layer in copied.attention:
        if layer.state:
            layer.keys, layer.values = (mx.array(buffer) for buffer in layer.state)
    return copied


def _check_open_ended(batch: BatchCache) -> None:
    if any(batch.surplus):
        raise SpeculationError("a row that has ended has to leave first")
