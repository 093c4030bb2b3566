"""Speculation: tokens are written before it is known whether they stay, and each row keeps its own.

A transaction is one or more steps, then a commit or a discard::

    speculation = Speculation(batch)
    with speculation.step(length):
        logits = model(tokens, cache=speculation.layers)  # tokens: [rows, length]
    speculation.commit([3, 0, length])  # how many of its tokens each row keeps, the first ones

Attention layers write into their rings at once. A window takes room for all that is written beside
the whole window, so that nothing is lost that a query could still see. Rejected columns are not
erased: the cursor goes back over them. It is one for all rows, and what a row holds lies in one run
behind it; so if rows keep different numbers, those that the cursor does not suit are moved (see
``Ring.settle``). If all keep as many, and in a batch of one, a commit copies nothing.

A recurrent state has no way back but to where it was kept: the start of the transaction and the end
of each of its steps. For a row to keep another number, its tokens have to be replayed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.layer import LayerCache, gather
from chairlift.cache.snapshot import KVPiece
from chairlift.cache.state import Slots, StateLayer

# Feeds the model the tokens [start, stop) of the transaction, all rows, with Speculation.layers.
Replay = Callable[[int, int], object]


class SpeculationError(Exception):
    """A transaction cannot be begun, or what was asked does not fit what it has come to."""


class NeedsReplay(SpeculationError):
    """Rows would keep a number of tokens after which no recurrent state was kept: ``rows``."""

    def __init__(self, rows: Sequence[int], stops: Sequence[int]) -> None:
        super().__init__(f"states of rows {list(rows)} were kept only after {list(stops)} tokens")
        self.rows = list(rows)


class Speculation:
    """Transactions on all rows of a batch, one after the other.

    Rows may join and leave between them, not within one. An exception from here leaves the batch
    and the transaction as they were.

    Args:
        batch: whose rows speculate; none may have padding after its last token.
        isolated: to work on a copy (``batch``), and never touch the batch that was given: for
            checking what a transaction does.

    Raises:
        SpeculationError: a layer's kind cannot take part (named), or a row has ended.
    """

    def __init__(self, batch: BatchCache, isolated: bool = False) -> None:
        for layer in batch.parts:
            if not isinstance(layer, LayerCache | StateLayer):
                raise SpeculationError(f"{type(layer).__name__} cannot take tokens back")
        _check_open_ended(batch)
        self.batch = copy.deepcopy(batch) if isolated else batch
        self._states = [part for part in self.batch.parts if isinstance(part, StateLayer)]
        # States by how many tokens of the transaction they have taken; empty: none is under way.
        self._checkpoints: dict[int, list[Slots]] = {}
        # What each row may keep, and where it is, after the last step.
        self._own: list[int] = []
        self._offsets: list[int] = []

    @property
    def layers(self) -> Sequence[Any]:
        """What goes to the model as its cache."""
        return self.batch.layers

    @property
    def written(self) -> int:
        """Tokens of each row that await a commit, padding included; 0 outside a transaction."""
        return max(self._checkpoints, default=0)

    @contextmanager
    def step(self, length: int, real: Sequence[int] | None = None) -> Iterator[None]:
        """Every row takes ``length`` tentative tokens from the model call inside.

        The first step begins a transaction, others go on with it. ``real``, in the last one, says
        how many of them are each row's own; what follows is padding, which no row can keep. If the
        call inside fails, the step never was.

        Raises:
            SpeculationError: no tokens, a row has ended, rows joined or left within the
                transaction, or padding would enter a state.
        """
        own = [length] * len(self.batch) if real is None else list(real)
        self._check_step(length, own)
        written = self.written
        checkpoints = self._checkpoints or {0: self._checkpoint()}
        # One column more than the step itself needs: a window is extracted with ``window`` tokens.
        capacity = Capacity(len(self.batch), self.batch.tokens + length)
        self.batch.reserve(capacity, step=written + length + 1)
        try:
            with self.batch.step(length, own):
                yield
        except BaseException:
            self.batch.forget(length)
            self._restore(checkpoints, [written] * len(self.batch))
            raise
        self._checkpoints = checkpoints | {written + length: self._checkpoint()}
        self._own = [written + new for new in own]
        self._offsets = list(self.batch.offsets)

    def commit(self, accepted: Sequence[int], replay: Replay | None = None) -> None:
        """Row ``r`` keeps the first ``accepted[r]`` of the tokens it wrote; the rest never was.

        If states were not kept there, the transaction is taken back and ``replay`` is called for
        the tokens up to each number in turn: the rows that keep fewer are fed the rest as well, and
        give it back. If it fails, the transaction is discarded.

        Raises:
            SpeculationError: nothing was written since the last commit, the numbers are not one a
                row or not within what it wrote, or rows joined or left in between.
            NeedsReplay: as said, and there is no ``replay``.
        """
        self._check_commit(accepted)
        uncut = [r for r, kept in enumerate(accepted) if kept not in self._checkpoints]
        if self._states and uncut:
            if replay is None:
                raise NeedsReplay(uncut, sorted(self._checkpoints))
            self._replay(accepted, replay)
        self._settle(accepted)

    def discard(self) -> None:
        """All that was written never was.

        Raises:
            SpeculationError: nothing was written since the last commit, or rows joined or left.
        """
        self._check_current()
        self._settle([0] * len(self.batch))

    def _settle(self, accepted: Sequence[int]) -> None:
        self.batch.settle(self.written, accepted)
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
            state.settle({stop: slots[i] for stop, slots in checkpoints.items()}, kept)

    def _check_step(self, length: int, own: Sequence[int]) -> None:
        if self._checkpoints:
            self._check_current()
        _check_open_ended(self.batch)
        if length < 1 or len(own) != len(self.batch) or not all(0 <= n <= length for n in own):
            raise SpeculationError(f"rows {len(self.batch)} cannot take {own} of {length} tokens")
        if not self.batch.pads and any(n < length for n in own):
            raise SpeculationError("padding would enter a recurrent state")

    def _check_commit(self, accepted: Sequence[int]) -> None:
        self._check_current()
        if len(accepted) != len(self._own):
            raise SpeculationError(f"{len(accepted)} numbers for {len(self._own)} rows")
        for row, (kept, own) in enumerate(zip(accepted, self._own, strict=True)):
            if not 0 <= kept <= own:
                raise SpeculationError(f"row {row} wrote {own} tokens and cannot keep {kept}")

    def _check_current(self) -> None:
        if not self._checkpoints:
            raise SpeculationError("nothing was written since the last commit")
        if self.batch.offsets != self._offsets:
            raise SpeculationError("the batch has gone on without the transaction")


def _check_open_ended(batch: BatchCache) -> None:
    if any(batch.surplus):
        raise SpeculationError("a row that has ended has to leave first")


def logical_view(batch: BatchCache, layer: int, row: int | None, tokens: int) -> KVPiece:
    """The newest ``tokens`` that an attention layer holds of a row (None: of each), oldest first.

    For draft models that read the target's keys and values. Nothing is written, and memory is
    shared where the columns are one run: evaluate what is built on it before the next step, or that
    copies the buffers. A quantized layer's are packed, as it stores them.

    Returns:
        Keys and values ``[1 or rows, heads, tokens, dim]``.

    Raises:
        SpeculationError: the layer has no keys, a row has not as many that are sure to be held (of
            a window, ``window - 1``), or rows have different padding.
    """
    part = batch.parts[layer]
    if not isinstance(part, LayerCache) or not part.state:
        raise SpeculationError(f"layer {layer} ({type(part).__name__}) holds no keys and values")
    rows = range(len(batch)) if row is None else [row]
    window = part.ring.window
    most = min((batch.offsets[r] for r in rows), default=0)
    most = most if window is None else min(most, window - 1)
    stops = {part.ring.cursor - batch.surplus[r] for r in rows}
    if not 0 <= tokens <= most or len(stops) != 1:
        raise SpeculationError(f"{tokens} tokens of rows {list(rows)} are not held")
    first, last = rows[0], rows[-1] + 1
    spans = part.ring.spans(stops.pop(), tokens)
    keys, values = (gather(buffer[first:last], spans) for buffer in part.state)
    return KVPiece(keys, values)
