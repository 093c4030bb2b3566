"""Sizes of KV buffers: plain arithmetic, shared by the caches and the scheduler's budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Columns are allocated in multiples of this: growing costs a copy, which should be rare even for
# short rows.
COLUMN_STEP = 64
ROW_STEP = 4
# A buffer shrinks only when it has this many times the rows that it needs, so that a batch whose
# size swings is not copied at every swing. For columns the factor is smaller: they cost time in
# every step in which attention reads them all.
SHRINK_ROWS = 16
SHRINK_COLUMNS = 4


class Capacity(NamedTuple):
    """The size of a batch's buffers: rows, and columns (tokens) a row."""

    rows: int
    columns: int


def rounded_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def padded(tokens: int, multiple: int) -> int:
    """The padded length of a prompt's last chunk, so that shapes repeat: ``tokens`` rounded up to
    ``multiple``, unless that would at least double it.
    """
    return rounded_up(tokens, multiple) if 2 * tokens > multiple else tokens


def bucket(need: int, step: int) -> int:
    """The capacity to allocate for ``need``: a multiple of ``step``, at most 1/4 above it if large.

    Growing through these sizes copies a token about five times over a row's life.
    """
    if need <= 0:
        return 0
    quarter = 1 << max(0, need.bit_length() - 3)
    unit = max(step, quarter)
    return rounded_up(need, unit)


def row_bucket(need: int) -> int:
    """As ``bucket`` for rows: 1, 2, or a multiple of ``ROW_STEP``.

    Rows of thousands of columns are often alone in their batch.
    """
    return need if need < ROW_STEP - 1 else bucket(need, ROW_STEP)


def grown(need: Capacity, now: Capacity) -> Capacity:
    """The capacity to which a buffer of ``now`` has to grow for ``need``."""
    return Capacity(
        now.rows if need.rows <= now.rows else row_bucket(need.rows),
        now.columns if need.columns <= now.columns else bucket(need.columns, COLUMN_STEP),
    )


def resized(need: Capacity, now: Capacity) -> Capacity:
    """As ``grown``, but dimensions that are far larger than needed shrink."""
    small = Capacity(row_bucket(need.rows), bucket(need.columns, COLUMN_STEP))
    kept = grown(need, now)
    return Capacity(
        kept.rows if kept.rows <= SHRINK_ROWS * small.rows else small.rows,
        kept.columns if kept.columns <= SHRINK_COLUMNS * small.columns else small.columns,
    )


def resize_order(now: Sequence[Capacity], then: Sequence[Capacity]) -> list[int]:
    """The order in which to resize several buffers: those that free memory first."""
    growth = [
        new.rows * new.columns - old.rows * old.columns for old, new in zip(now, then, strict=True)
    ]
    return sorted(range(len(growth)), key=growth.__getitem__)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The memory of a model's caches per token and per row.

    Attributes:
        full_bytes: bytes per token of all full-attention layers together.
        window_bytes: for each window size in tokens, bytes per token of all its layers together.
        row_bytes: bytes per row, independent of its length: the states of recurrent layers.
        layer_bytes: for each window (None: full attention), bytes per token of its largest layer.
        step: tokens that a decode step may write in a row, those of a draft included.
    """

    full_bytes: int
    window_bytes: Mapping[int, int] = field(default_factory=dict)
    row_bytes: int = 0
    layer_bytes: Mapping[int | None, int] = field(default_factory=dict)
    step: int = 1

    @property
    def pads(self) -> bool:
        """Whether rows may take padding in a step; it would corrupt a recurrent state."""
        return not self.row_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that is cached in every layer."""
        return self.full_bytes + sum(self.window_bytes.values())

    def reserved(self, capacity: Capacity, step: int = 1) -> int:
        """Bytes of the buffers of a batch that writes ``step`` columns at a time."""
        return self._attention_bytes(capacity, step) + capacity.rows * self.row_bytes

    def moved(self, now: Capacity, capacity: Capacity) -> int:
        """Peak bytes while a batch's buffers are resized from ``now`` to ``capacity``.

        Layers are resized one after the other, shrinking windows before growing ones, and each new
        buffer is allocated before its old one is freed. The largest layer's copy is counted even if
        nothing moves, so that a batch can always shrink.
        """
        larger = max(self._attention_bytes(now), self._attention_bytes(capacity))
        states = max(now.rows, capacity.rows) * self.row_bytes
        return larger + states + self._largest_copy(capacity)

    def moved_bands(self, now: Sequence[Capacity], then: Sequence[Capacity]) -> int:
        """Peak bytes while several batches' buffers are resized one after the other."""
        before, after = list(map(self.reserved, now)), list(map(self.reserved, then))
        allocated, peak = sum(before), 0
        for i in resize_order(now, then):
            allocated -= before[i]
            peak = max(peak, allocated + self.moved(now[i], then[i]))
            allocated += after[i]
        return max(peak, allocated + max(map(self._largest_copy, then), default=0))

    def _attention_bytes(self, capacity: Capacity, step: int = 1) -> int:
        """Bytes of the buffers of all attention layers."""
        step = max(step, self.step)
        row = capacity.columns * self.full_bytes
        for window, size in self.window_bytes.items():
            row += _columns(window, capacity.columns, step) * size
        return capacity.rows * row

    def _largest_copy(self, capacity: Capacity) -> int:
        """Bytes of the largest layer's buffers."""
        copies = (
            _columns(window, capacity.columns, self.step) * size
            for window, size in self.layer_bytes.items()
        )
        return capacity.rows * max(copies, default=0)

    def used(self, lengths: Iterable[int]) -> int:
        """Bytes that the tokens of rows of these lengths occupy."""
        lengths = list(lengths)
        total = len(lengths) * self.row_bytes + sum(lengths) * self.full_bytes
        for window, size in self.window_bytes.items():
            total += size * sum(min(length, window) for length in lengths)
        return total


def _columns(window: int | None, columns: int, step: int = 1) -> int:
    """Columns of a layer's buffers in a batch that holds ``columns`` tokens of each row."""
    return columns if window is None else min(columns, window - 1 + step)
