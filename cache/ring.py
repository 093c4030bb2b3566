"""The geometry of a layer's buffers: each row has its own ring of columns and its own cursor.

A row's tokens are in the ``lengths[r]`` columns directly before its cursor; every other column is
padding for it, whatever its content. A row begins at column 0, so with full attention it never
wraps; the columns of a sliding window are written again and again. Keys are stored rotated (RoPE),
so attention does not depend on their order in the ring.

        column     0    1    2    3    4    5    6    7
        row 0      k0   k1   k2   k3   k4   k5   --   --      length 6, cursor 6
        row 1      k8   k9   k2   k3   k4   k5   k6   k7      length 8, cursor 2 (a window)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def gather(buffer: mx.array, spans: Sequence[Span]) -> mx.array:
    """Concatenates runs of columns of ``[rows, heads, columns, dim]``."""
    parts = [buffer[:, :, span.start : span.stop] for span in spans]
    if not parts:
        return buffer[:, :, :0]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


@dataclass(slots=True)
class Ring:
    """The geometry that all layers of one kind share: where rows write, which columns are valid.

    Attributes:
        window: maximum tokens that a query sees, its own included; None: all.
        rows: allocated rows.
        columns: allocated columns.
        cursors: the column that each row in use writes next.
        lengths: the tokens of each row in use, stored directly before its cursor.
        left: by row, the newest column of the sequence that had the row before; None if any of its
            columns may have values that are not finite.
    """

    window: int | None = None
    rows: int = 0
    columns: int = 0
    cursors: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    left: dict[int, int | None] = field(default_factory=dict)

    @property
    def aligned(self) -> bool:
        """Whether all rows write at the same column."""
        return len(set(self.cursors)) <= 1

    def needed(self, columns: int, step: int) -> int:
        """Columns that this ring needs for rows of ``columns`` tokens, written ``step`` at a time.

        A window keeps ``window - 1`` old tokens, so that the first of ``step`` new queries still
        sees its full window.
        """
        return columns if self.window is None else min(columns, self.window - 1 + step)

    def allotted(self, columns: int, step: int) -> int:
        """Columns that this ring gets when it is resized: as many as needed.

        A window that has more keeps them for a longer step: a prompt's last chunk is short, the
        next one long.
        """
        needed = self.needed(columns, step)
        is_enough = self.window is not None and self.columns >= needed
        return min(self.columns, columns) if is_enough else needed

    def spans(self, stop: int, width: int) -> list[Span]:
        """The ``width`` columns before column ``stop`` (unwrapped), oldest first, in runs."""
        if width == 0:
            return []
        start = (stop - width) % self.columns
        if start + width <= self.columns:
            return [Span(start, start + width)]
        return [Span(start, self.columns), Span(0, start + width - self.columns)]

    def visible(self, step: int) -> Span:
        """The columns that attention reads once each row has written ``step`` new ones.

        The columns from 0 to the last one in use; all columns if a row wraps.
        """
        stop = max(self.cursors, default=0) + step
        room = self.columns - step
        rows = zip(self.cursors, self.lengths, strict=True)
        if stop > self.columns or any(cursor < length and cursor < room for cursor, length in rows):
            return Span(0, self.columns)
        return Span(0, stop)

    def seen(self, counts: Sequence[int]) -> list[tuple[int, int]] | None:
        """The columns before ``counts[r]`` new tokens of each row that all of them see.

        Returns:
            How many, and the first of them; behind the last column of the buffer its first one
            follows. None if a window shows several tokens of a row different ones.
        """
        seen = []
        for cursor, length, count in zip(self.cursors, self.lengths, counts, strict=True):
            if self.window is not None and length + count > self.window:
                if count > 1:
                    return None
                length = self.window - 1
            seen.append((length, (cursor - length) % self.columns))
        return seen

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
        level = old <= kept and all(length >= old for length in self.lengths)
        if level and limit >= visible.width and not as_array:
            if step == 1:
                return None
            if all((cursor + step - visible.stop) % self.columns == 0 for cursor in self.cursors):
                return "causal"
        # Equivalent to comparing ``behind``, without an integer for every query and column.
        key_age, query_age = self._ages(step)
        lengths = mx.minimum(mx.array(self.lengths), kept)
        seen = mx.minimum(lengths[:, None] + mx.arange(1, step + 1)[None, :], limit)
        within = key_age < (seen + query_age)[:, :, None]
        return (within & (key_age >= query_age[:, None]))[:, None]

    def behind(self, step: int) -> mx.array:
        """The distance in tokens from each of ``step`` new queries back to each visible column.

        For a column that a row does not use, the distance is that at which it would use the column;
        a negative distance means that it follows the query.

        Returns:
            Integers ``[rows, step, visible columns]``.
        """
        key_age, query_age = self._ages(step)
        return key_age - query_age[:, None]

    def _ages(self, step: int) -> tuple[mx.array, mx.array]:
        """The distances in tokens of columns and queries from their row's newest column.

        Returns:
            Columns ``[rows, 1, visible columns]``, and new queries ``[step]``.
        """
        newest = mx.array(self.cursors, mx.int32) + (step - 1)
        age = (newest[:, None] - mx.arange(*self.visible(step))) % self.columns
        return age[:, None], mx.arange(step - 1, -1, -1)

    def index(self, behind: mx.array, step: int) -> mx.array:
        """The visible column that lies ``behind`` tokens before a step's newest one, by element.

        Args:
            behind: ``[rows, ...]``. Distances beyond the visible columns are clipped to one of
                them.
        """
        visible = self.visible(step)
        newest = mx.array(self.cursors, mx.int32) + (step - 1)
        newest = newest.reshape(-1, *[1] * (behind.ndim - 1))
        column = newest - mx.clip(behind, 0, visible.width - 1)
        if visible.width == self.columns:
            return column % self.columns
        return mx.maximum(column, 0)

    def advance(self, step: int) -> None:
        """Counts ``step`` columns as written for every row; a window drops its oldest."""
        columns = self.columns
        self.cursors = [(cursor + step) % columns for cursor in self.cursors]
        self.lengths = [
            length + step if length + step < columns else columns for length in self.lengths
        ]

    def forget(self, step: int) -> None:
        """Drops the columns that an unfinished step of ``step`` tokens may have overwritten.

        No row's window loses any of them if the ring has room for the step (see ``needed``).
        """
        self.lengths = [min(length, self.columns - step) for length in self.lengths]

    def take_back(self, written: int, kept: Sequence[int]) -> None:
        """Removes the newest ``written`` columns, of which row ``r`` keeps the first ``kept[r]``.

        Only the rows' cursors move; nothing is copied.
        """
        for row, keep in enumerate(kept):
            self.rewind(row, written - keep)

    def rewind(self, row: int, columns: int) -> None:
        """Removes the newest ``columns`` columns of a row; all of them if it has no more."""
        left = self.lengths[row] - columns
        self.cursors[row] = (self.cursors[row] - columns) % self.columns if left > 0 else 0
        self.lengths[row] = max(0, left)

    def place(self, row: int, tokens: int) -> None:
        """Sets a row whose ``tokens`` are in the first columns."""
        self.cursors[row] = tokens % self.columns if tokens else 0
        self.lengths[row] = tokens

    def kept(self, columns: int) -> list[list[Span]]:
        """The columns of each row that buffers of ``columns`` keep, in their new order.

        Windows that keep their size stay as they are: moving each wrapped row would take too long.
        """
        if columns == self.columns and self.window is not None:
            return [[Span(0, columns)] for _ in self.lengths]
        rows = zip(self.cursors, self.lengths, strict=True)
        return [self.spans(cursor, min(length, columns)) for cursor, length in rows]

    def resize(self, rows: int, columns: int) -> None:
        """Sets the allocated size; the rows' tokens are where ``kept`` puts them."""
        unchanged = columns == self.columns
        self.rows, self.columns = rows, columns
        self.left.clear()
        if not unchanged:
            for row, length in enumerate(self.lengths):
                self.place(row, min(length, columns))

    def holds(self, row: int, column: int) -> bool:
        """Whether a column has one of a row's tokens."""
        return (self.cursors[row] - 1 - column) % self.columns < self.lengths[row]

    def stale(self, row: int) -> list[Span]:
        """The columns of a row's former sequence that its next one has to overwrite."""
        if row not in self.left:
            return []
        if (column := self.left[row]) is None:
            length = self.lengths[row]
            return self.spans(self.cursors[row] - length, self.columns - length)
        return [] if self.holds(row, column) else [Span(column, column + 1)]

    def arrange(self, order: Sequence[int], nonfinite: Collection[int] = ()) -> None:
        """Keeps the rows ``order``, in this order; sets ``left`` of rows that are new or free.

        ``nonfinite`` are rows, before, whose columns may have values that are not finite.
        """
        for row, cursor in enumerate(self.cursors):
            if row >= len(order) or order[row] != row:
                newest = (cursor - 1) % max(1, self.columns)
                self.left[row] = None if row in nonfinite else newest
        self.cursors = [self.cursors[row] for row in order]
        self.lengths = [self.lengths[row] for row in order]

    def check_integrity(self) -> None:
        """Asserts the invariants between two steps."""
        assert len(self.lengths) == len(self.cursors) <= self.rows, self
        assert all(row < self.rows for row in self.left), self
        for row, (cursor, length) in enumerate(zip(self.cursors, self.lengths, strict=True)):
            assert 0 <= cursor < max(1, self.columns), (row, cursor, self.columns)
            assert 0 <= length <= self.columns, (row, length, self.columns)
            # With full attention a row begins at column 0, so what attention reads is one run.
            assert self.window is not None or cursor == length % max(1, self.columns), (row, self)


def order_without(rows: Collection[int], count: int) -> list[int]:
    """The former number of each row once ``rows`` of ``count`` have left: the last rows take the
    freed numbers.
    """
    remaining = count - len(rows)
    order = list(range(remaining))
    movers = (row for row in range(remaining, count) if row not in rows)
    for row, mover in zip(sorted(row for row in rows if row < remaining), movers, strict=True):
        order[row] = mover
    return order
