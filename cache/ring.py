"""The ring geometry: one buffer of keys and values per layer, one cursor for all its rows.

All rows write at the same columns, so a write is one slice. Row ``r`` has its tokens in the
``lengths[r]`` columns directly behind the cursor; every other column is padding for it, whatever
its content. Keys are stored rotated (RoPE), so attention does not depend on their order in the
ring. A sliding window is the same ring with bounded lengths.

        column     0    1    2    3    4    5    6    7
        row 0      k6   k7   --   --   k2   k3   k4   k5      length 6
        row 1      k1   k2   --   --   --   --   --   k0      length 3
                              ^ cursor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx


class Span(NamedTuple):
    """A run of adjacent columns, ``stop`` excluded."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start


class Move(NamedTuple):
    """A move of a row's ``tokens`` columns before column ``stop`` to directly behind the cursor."""

    row: int
    stop: int
    tokens: int


@dataclass(slots=True)
class Ring:
    """The geometry that all layers of one kind share: where to write, which columns are valid.

    Attributes:
        window: maximum tokens that a query sees, its own included; None: all.
        rows: allocated rows.
        columns: allocated columns.
        cursor: the column that the next step writes first.
        lengths: the tokens of each row in use, stored directly behind the cursor.
    """

    window: int | None = None
    rows: int = 0
    columns: int = 0
    cursor: int = 0
    lengths: list[int] = field(default_factory=list)

    def needed(self, columns: int, step: int) -> int:
        """Columns that this ring needs for rows of ``columns`` tokens, written ``step`` at a time.

        A window keeps ``window - 1`` old tokens, so that the first of ``step`` new queries still
        sees its full window.
        """
        return columns if self.window is None else min(columns, self.window - 1 + step)

    def spans(self, stop: int, width: int) -> list[Span]:
        """The ``width`` columns before column ``stop`` (unwrapped), oldest first, in runs."""
        if width == 0:
            return []
        start = (stop - width) % self.columns
        if start + width <= self.columns:
            return [Span(start, start + width)]
        return [Span(start, self.columns), Span(0, start + width - self.columns)]

    def visible(self, step: int) -> Span:
        """The columns that attention reads once ``step`` new ones are written at the cursor.

        The columns in use if they are one run, else the entire ring.
        """
        live = min(self.columns, max(self.lengths, default=0) + step)
        runs = self.spans(self.cursor + step, live)
        return runs[0] if len(runs) == 1 else Span(0, self.columns)

    def mask(
        self, step: int, window: int | None = None, as_array: bool = False
    ) -> mx.array | str | None:
        """The mask of visible columns that each of ``step`` new queries attends to.

        ``window`` is the model's request; None means the ring's window.

        Returns:
            Booleans ``[rows, 1, step, visible columns]``; or, unless ``as_array``, None if all
            columns are seen and "causal" if each query sees all columns up to itself.
        """
        visible = self.visible(step)
        old = visible.width - step
        # Tokens that a window still has at the first query; the model's window may be larger.
        kept = old if self.window is None else self.window - 1
        limit = window or self.window or visible.width
        in_order = (self.cursor + step) % self.columns == visible.stop % self.columns
        level = all(length == old for length in self.lengths) and old <= kept
        if level and limit >= visible.width and not as_array and (in_order or step == 1):
            return None if step == 1 else "causal"
        # Equivalent to comparing ``behind``, without an integer for every query and column.
        key_age, query_age = self._ages(step)
        lengths = mx.minimum(mx.array(self.lengths), kept)
        seen = mx.minimum(lengths[:, None] + mx.arange(1, step + 1)[None, :], limit)
        within = key_age < (seen + query_age)[:, :, None]
        return (within & (key_age >= query_age[:, None])[None])[:, None]

    def behind(self, step: int) -> mx.array:
        """The distance in tokens from each of ``step`` new queries back to each visible column.

        Valid for rows that use the column; a negative distance means that it follows the query.

        Returns:
            Integers ``[step, visible columns]``.
        """
        key_age, query_age = self._ages(step)
        return key_age[None, :] - query_age[:, None]

    def _ages(self, step: int) -> tuple[mx.array, mx.array]:
        """The distances in tokens of visible columns and new queries from the newest column."""
        newest = (self.cursor + step - 1) % self.columns
        key_age = (newest - mx.arange(*self.visible(step))) % self.columns
        return key_age, mx.arange(step - 1, -1, -1)

    def index(self, behind: mx.array, step: int) -> mx.array:
        """The visible column that lies ``behind`` tokens before a step's newest one, by element.

        Distances beyond the visible columns are clipped to the nearest one.
        """
        visible = self.visible(step)
        newest = self.cursor + step - 1
        return (newest - mx.clip(behind, 0, visible.width - 1)) % self.columns - visible.start

    def advance(self, step: int) -> None:
        """Counts ``step`` columns as written for every row; a window drops its oldest."""
        self.cursor = (self.cursor + step) % self.columns
        self.lengths = [min(length + step, self.columns) for length in self.lengths]

    def forget(self, step: int) -> None:
        """Drops the columns that an unfinished step of ``step`` tokens may have overwritten.

        No row's window loses any of them if the ring has room for the step (see ``needed``).
        """
        self.lengths = [min(length, self.columns - step) for length in self.lengths]

    def settle(self, written: int, kept: Sequence[int]) -> list[Move]:
        """Removes the newest ``written`` columns, of which row ``r`` keeps the first ``kept[r]``.

        Each row's columns must be one run behind the shared cursor. So the cursor moves to the
        position that needs the least copying: rows that kept as many columns as it advanced stay in
        place, and the others move completely (in a window, at most its width).

        Returns:
            The current places of the other rows, whose columns must be moved behind the cursor.
        """
        start = self.cursor - written
        lengths = [length - written + keep for length, keep in zip(self.lengths, kept, strict=True)]
        moved = [min(tokens, self.window or tokens) for tokens in lengths]

        def cost(front: int) -> tuple[int, int]:
            away = [n for n, keep in zip(moved, kept, strict=True) if keep != front]
            return sum(away), len(away)

        front = min(sorted(set(kept)), key=cost, default=0)
        self.cursor = (start + front) % self.columns if self.columns else 0
        moves = [
            Move(row, start + keep, moved[row]) for row, keep in enumerate(kept) if keep != front
        ]
        self.lengths = [
            in_place if keep == front else after_move
            for in_place, after_move, keep in zip(lengths, moved, kept, strict=True)
        ]
        return moves

    def check_integrity(self) -> None:
        """Asserts the invariants between two steps."""
        assert len(self.lengths) <= self.rows, (self.lengths, self.rows)
        assert 0 <= self.cursor < max(1, self.columns), (self.cursor, self.columns)
        for row, length in enumerate(self.lengths):
            assert 0 <= length <= self.columns, (row, length, self.columns)
