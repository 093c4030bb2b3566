"""Sequences whose tokens are in pages: the decode rows, or one prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np

from chairlift.cache.capacity import Capacity
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import PAGE_TOKENS, page_count
from chairlift.cache.pages.piece import PagedPiece, PageRun
from chairlift.cache.pages.rows import PageRows
from chairlift.cache.pages.states import RowStates
from chairlift.cache.ring import order_without
from chairlift.cache.snapshot import (
    AttentionPiece,
    LayerKind,
    LayerState,
    Snapshot,
    StatePiece,
    resumable,
)


class PagedBatch:
    """Rows numbered 0 to ``len(batch) - 1`` without gaps, with the interface of ``BatchCache``.

    A row takes pages as it grows, and gives back those that its windows have left behind. A row
    that joins shares the pages of its snapshot. Nothing is ever moved: a row that leaves is removed
    from a list. ``layer.paged_step`` runs model calls.
    """

    # Kernels write the pages, in the order in which steps are dispatched, so a step may be
    # dispatched while the one before still runs.
    queued = True
    # Rows have no buffers of their own.
    capacity = Capacity(0, 0)

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.rows = {window: PageRows(pool) for window, pool in memory.pools.items()}
        self.row_states = RowStates(memory.forms_of_states)
        self.offsets: list[int] = []

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Each layer's kind."""
        return self.memory.kinds

    @property
    def total_columns(self) -> int:
        """The number of tokens that the rows' pages have room for."""
        pages = -(-np.array(self.offsets, np.int64) // PAGE_TOKENS)
        return PAGE_TOKENS * int(pages.sum())

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate so that the last step's tokens are written."""
        return [*self.memory.effects, *self.states]

    @property
    def states(self) -> list[mx.array]:
        """The recurrent states. Evaluate them: a step's logits need not depend on them."""
        return self.row_states.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' pages and states; a page that rows share counts once."""
        total = self.row_states.nbytes
        for window, rows in self.rows.items():
            used = np.zeros(self.memory.pools[window].pages + 1, np.bool_)
            rows.mark(used)
            total += int(used[1:].sum()) * self.memory.page_bytes(window)
        return total

    def join(self, state: Snapshot | None = None) -> int:
        """Adds a row, empty or with the state of tokens ``[0, stop)``; returns its number.

        Raises:
            ValueError: the state does not begin at 0, or is too incomplete to resume from its end.
        """
        row = len(self)
        self.offsets.append(0)
        for rows in self.rows.values():
            rows.join()
        if state is not None and (state.start or not resumable(self.kinds, [state])):
            raise ValueError(f"a row cannot go on from [{state.start}, {state.stop})")
        self.row_states.join(self._states_of(state))
        if state is not None and state.stop:
            self.offsets[row] = state.stop
            for rows in self.rows.values():
                self._restore(row, rows, state)
        return row

    def _states_of(self, state: Snapshot | None) -> list[StatePiece | None]:
        """A row's state in each recurrent layer."""
        layers = zip(self.kinds, state.layers if state else self.kinds, strict=True)
        pieces = [piece for kind, piece in layers if kind.recurrent]
        return [piece if isinstance(piece, StatePiece) else None for piece in pieces]

    def _restore(self, row: int, rows: PageRows, state: Snapshot) -> None:
        """Gives an empty row one kind's tokens of a state.

        NOTE: writes are dispatched at once, because pages are read and written in that order.
        """
        attention = [
            piece
            for kind, piece in zip(self.kinds, state.layers, strict=True)
            if not kind.recurrent
        ]
        layers = [i for i, layer in enumerate(self.memory.layers) if layer.pool is rows.pool]
        pieces = [attention[i] for i in layers]
        first = pieces[0]
        if isinstance(first, PagedPiece) and first.layer.pool is rows.pool:
            needed = rows.pool.oldest_seen(state.stop)
            run = first.run.part(max(first.run.start, needed), state.stop)
            if (source := rows.adopt(row, run)) is not None:
                (last,) = rows.last(row, 1)
                rows.pool.copies.add(source, last)
            return
        tokens = min((p.tokens for p in pieces if isinstance(p, AttentionPiece)), default=0)
        tokens = min(tokens, state.stop - rows.pool.oldest_seen(state.stop))
        oldest = state.stop - tokens
        rows.begin(row, oldest)
        rows.grow(row, state.stop)
        pages = rows.last(row, page_count(state.stop) - oldest // PAGE_TOKENS)
        for i, piece in zip(layers, pieces, strict=True):
            if isinstance(piece, AttentionPiece) and tokens:
                newest = piece.newest(tokens).loaded()
                mx.async_eval(self.memory.layers[i].put(pages, oldest % PAGE_TOKENS, newest))

    def leave(self, rows: Collection[int], nonfinite: Collection[int] = ()) -> list[int]:
        """Removes rows; the last rows take the freed numbers, and nothing is copied.

        Whatever ``nonfinite`` rows have written, kernels read only what a row itself has written.

        Returns:
            The former number of each remaining row, in the new order.
        """
        order = order_without(rows, len(self))
        for pages in self.rows.values():
            for row in rows:
                pages.release(row, self.offsets[row])
            pages.arrange(order)
        self.row_states.arrange(order)
        self.offsets = [self.offsets[row] for row in order]
        return order

    def extract(self, row: int, start: int = 0) -> Snapshot:
        """A row's cached tokens from ``start`` on, which stay in their pages, and its states."""
        stop = self.offsets[row]
        runs: dict[int | None, PageRun] = {
            window: rows.run(row, start, stop) for window, rows in self.rows.items()
        }
        pieces = [
            PagedPiece(layer, run) if (run := runs[layer.pool.window]).pages else None
            for layer in self.memory.layers
        ]
        states = self.row_states.get(row)
        layers: list[LayerState | None] = self.memory.arranged(pieces, states)
        return Snapshot(start, stop, tuple(layers))

    def hand_over(self, row: int) -> Snapshot:
        """The state of a row that takes no further step; another row may continue in its pages."""
        state = self.extract(row)
        for pages in self.rows.values():
            pages.release(row, state.stop)
        return state

    def grow(self, tokens: Sequence[int]) -> None:
        """Takes the pages for ``tokens[r]`` more tokens of row ``r``.

        Raises:
            OutOfPages: there are too few.
        """
        stops = np.array(self.offsets, np.int32) + np.array(tokens, np.int32)
        for pages in self.rows.values():
            pages.grow_all(stops)

    def advance(self, tokens: Sequence[int]) -> None:
        """Counts ``tokens[r]`` more tokens of row ``r`` as written.

        Further tokens that the row's last step has written are overwritten by the next.
        """
        self.row_states.keep(tokens)
        self.offsets = [offset + new for offset, new in zip(self.offsets, tokens, strict=True)]
        stops = np.array(self.offsets, np.int32)
        for pages in self.rows.values():
            pages.give_back(stops)

    def take_moves(self) -> list[mx.array]:
        """Nothing is pending: a step dispatches the copies of its joins."""
        return []

    def resize(self, capacity: Capacity, step: int = 1) -> None:
        """Does nothing: rows take pages as they grow."""

    def reset(self) -> None:
        """Removes all rows."""
        self.leave(range(len(self)))

    def check_integrity(self) -> None:
        """Asserts the invariants between two steps."""
        for pages in self.rows.values():
            pages.check_integrity(self.offsets)
