"""The ring: one buffer of keys and values a layer, one cursor for all its rows.

All rows write at the same columns, so a write is one slice. Row ``r`` owns the ``lengths[r]``
columns just behind the cursor; every other column is padding for it, whatever it holds. Keys carry
their rotation already, so that their order in the ring means nothing to attention. A sliding
window is the same ring with the lengths bounded.

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
    """A run of neighbouring columns, ``stop`` excluded."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """How many columns it has."""
        return self.stop - self.start


class Move(NamedTuple):
    """A row's ``tokens`` columns before column ``stop``, to be put right behind the cursor."""

    row: int
    stop: int
    tokens: int


@dataclass(slots=True)
class Ring:
    """The geometry that all layers of one kind share: where to write, which columns count.

    ``window`` is the most tokens a query sees, its own included; None means all. ``rows``
    and ``columns`` are what is allocated; ``lengths`` the tokens each row in use holds, in columns
    right behind ``cursor``.
    """

    window: int | None = None
    rows: int = 0
    columns: int = 0
    cursor: int = 0
    lengths: list[int] = field(default_factory=list)

    def needed(self, columns: int, step: int) -> int:
        """Columns this ring needs to hold rows of ``columns`` tokens and write ``step`` at a time.

        A window keeps ``window - 1`` old tokens, so that the first of ``step`` new queries still
        sees its whole window.
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
        """The columns that attention must read once ``step`` new ones are written at the cursor.

        The live columns where they are one run, else the whole ring.
        """
        live = min(self.columns, max(self.lengths, default=0) + step)
        runs = self.spans(self.cursor + step, live)
        return runs[0] if len(runs) == 1 else Span(0, self.columns)

    def mask(
        self, step: int, window: int | None = None, as_array: bool = False
    ) -> mx.array | str | None:
        """Which of the visible columns each of ``step`` new queries attends to.

        ``window`` is the one a model asks for; None means the ring's own.

        Returns:
            Booleans ``[rows, 1, step, visible columns]``; or, unless ``as_array``, None where all
            is seen and "causal" where each query sees all up to itself.
        """
        visible = self.visible(step)
        old = visible.width - step
        # What a window remembers when the first query comes; a query may ask for more than that.
        kept = old if self.window is None else self.window - 1
        limit = window or self.window or visible.width
        in_order = (self.cursor + step) % self.columns == visible.stop % self.columns
        level = all(length == old for length in self.lengths) and old <= kept
        if level and limit >= visible.width and not as_array and (in_order or step == 1):
            return None if step == 1 else "causal"
        # The same as comparing ``behind``, without its integers of every query and column.
        key_age, query_age = self._ages(step)
        lengths = mx.minimum(mx.array(self.lengths), kept)
        held = mx.minimum(lengths[:, None] + mx.arange(1, step + 1)[None, :], limit)
        within = key_age < (held + query_age)[:, :, None]
        return (within & (key_age >= query_age[:, None])[None])[:, None]

    def behind(self, step: int) -> mx.array:
        """How many tokens each visible column lies behind each of ``step`` new queries.

        For a row that holds the column, that is; what is below 0 comes after the query.

        Returns:
            Integers ``[step, visible columns]``.
        """
        key_age, query_age = self._ages(step)
        return key_age[None, :] - query_age[:, None]

    def _ages(self, step: int) -> tuple[mx.array, mx.array]:
        """How many tokens visible columns and new queries lie behind the newest column."""
        newest = (self.cursor + step - 1) % self.columns
        key_age = (newest - mx.arange(*self.visible(step))) % self.columns
        return key_age, mx.arange(step - 1, -1, -1)

    def index(self, behind: mx.array, step: int) -> mx.array:
        """Which of the visible columns it is that lies so many tokens behind the newest of a step.

        What would lie outside of them is taken for the nearest one that does not. The same shape.
        """
        visible = self.visible(step)
        newest = self.cursor + step - 1
        return (newest - mx.clip(behind, 0, visible.width - 1)) % self.columns - visible.start

    def advance(self, step: int) -> None:
        """Counts ``step`` columns as written, for every row. A window forgets its oldest."""
        self.cursor = (self.cursor + step) % self.columns
        self.lengths = [min(length + step, self.columns) for length in self.lengths]

    def forget(self, step: int) -> None:
        """Gives up the columns that a step of ``step`` has overwritten, or may have, and not ended.

        None of them is in any row's window if there is room for the step (``needed``).
        """
        self.lengths = [min(length, self.columns - step) for length in self.lengths]

    def settle(self, written: int, kept: Sequence[int]) -> list[Move]:
        """Takes back the newest ``written`` columns, but row ``r`` keeps the first ``kept[r]``.

        A row's columns lie in one run behind the cursor, and the cursor is for all. So it goes to
        where it makes the least to copy: rows that kept as many as it has gone stay in place, and
        the others move as a whole (of a window, no more than its width).

        Returns:
            Where the others lie now: their columns have yet to be put behind the new cursor.
        """
        start = self.cursor - written
        held = [length - written + own for length, own in zip(self.lengths, kept, strict=True)]
        moved = [min(tokens, self.window or tokens) for tokens in held]

        def cost(front: int) -> tuple[int, int]:
            away = [n for n, own in zip(moved, kept, strict=True) if own != front]
            return sum(away), len(away)

        front = min(sorted(set(kept)), key=cost, default=0)
        self.cursor = (start + front) % self.columns if self.columns else 0
        moves = [Move(row, start + own, moved[row]) for row, own in enumerate(kept) if own != front]
        self.lengths = [
            most if own == front else least
            for most, least, own in zip(held, moved, kept, strict=True)
        ]
        return moves

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        assert len(self.lengths) <= self.rows, (self.lengths, self.rows)
        assert 0 <= self.cursor < max(1, self.columns), (self.cursor, self.columns)
        for row, length in enumerate(self.lengths):
            assert 0 <= length <= self.columns, (row, length, self.columns)
