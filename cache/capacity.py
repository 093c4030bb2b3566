"""How large buffers are: plain arithmetic, shared by the caches and the scheduler's budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Columns come in multiples of this: growing costs a copy, so it should be rare for short rows too.
COLUMN_STEP = 64
ROW_STEP = 4
# A buffer is given back only when it has so many times the rows that its content needs, so that a
# batch whose size swings does not copy itself with every swing; sooner if it has so many times the
# columns, which cost time in every step where attention reads them all.
SHRINK_ROWS = 16
SHRINK_COLUMNS = 4


class Capacity(NamedTuple):
    """What a batch's buffers can hold: rows, and columns (tokens) of each row."""

    rows: int
    columns: int


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is no less than ``number``."""
    return -(-number // multiple) * multiple


def padded(tokens: int, multiple: int) -> int:
    """Tokens that a prompt's last chunk of ``tokens`` is computed with, where shapes are to repeat:
    the next multiple, unless that is twice as many or more.
    """
    return rounded_up(tokens, multiple) if 2 * tokens > multiple else tokens


def bucket(need: int, step: int) -> int:
    """The capacity to allocate for ``need``: a multiple of ``step``, at most 1/4 above for large.

    Growing through these sizes copies a token about five times over a row's whole life.
    """
    if need <= 0:
        return 0
    quarter = 1 << max(0, need.bit_length() - 3)
    unit = max(step, quarter)
    return rounded_up(need, unit)


def grown(need: Capacity, now: Capacity) -> Capacity:
    """The capacity with which a buffer of ``now`` holds ``need`` as well."""
    return Capacity(
        now.rows if need.rows <= now.rows else bucket(need.rows, ROW_STEP),
        now.columns if need.columns <= now.columns else bucket(need.columns, COLUMN_STEP),
    )


def resized(need: Capacity, now: Capacity) -> Capacity:
    """The same, but for what is far larger than needed, which shrinks."""
    roomy = Capacity(bucket(need.rows, ROW_STEP), bucket(need.columns, COLUMN_STEP))
    kept = grown(need, now)
    return Capacity(
        kept.rows if kept.rows <= SHRINK_ROWS * roomy.rows else roomy.rows,
        kept.columns if kept.columns <= SHRINK_COLUMNS * roomy.columns else roomy.columns,
    )


def resize_order(now: Sequence[Capacity], then: Sequence[Capacity]) -> list[int]:
    """In which order several buffers get other capacities: who gives memory back goes first."""
    sizes = [
        (old.rows * old.columns, new.rows * new.columns) for old, new in zip(now, then, strict=True)
    ]
    return sorted(range(len(sizes)), key=lambda i: sizes[i][1] - sizes[i][0])


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one token costs in a model's caches.

    ``full_bytes`` is the sum over all full-attention layers, in bytes a token.
    ``window_bytes`` maps a window's size in tokens to the bytes a token of the layers that have it.
    ``row_bytes`` is what a row takes whatever its length: the states of recurrent layers.
    ``layer_bytes`` maps each window, None being full attention, to the bytes a token of its largest
    layer.
    """

    full_bytes: int
    window_bytes: Mapping[int, int] = field(default_factory=dict)
    row_bytes: int = 0
    layer_bytes: Mapping[int | None, int] = field(default_factory=dict)

    @property
    def pads(self) -> bool:
        """Whether rows may take padding in a step: not if there is a state for it to enter."""
        return not self.row_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes while it is in every layer."""
        return self.full_bytes + sum(self.window_bytes.values())

    def reserved(self, capacity: Capacity, step: int = 1) -> int:
        """Bytes of the buffers of a batch that writes ``step`` columns at a time."""
        return sum(self._reserved(capacity, step).values()) + capacity.rows * self.row_bytes

    def moved(self, now: Capacity, capacity: Capacity) -> int:
        """Bytes held at most while a batch's buffers of ``now`` become those of ``capacity``.

        Layers are moved one after the other, those of a window that shrinks before those of one
        that grows, and each new buffer is there before its old one goes. Room for the largest is
        counted even if nothing moves: so a batch can always shrink.
        """
        before, after = self._reserved(now), self._reserved(capacity)
        larger = max(sum(before.values()), sum(after.values()))
        copies = (
            capacity.rows * _columns(window, capacity.columns) * size
            for window, size in self.layer_bytes.items()
        )
        states = max(now.rows, capacity.rows) * self.row_bytes
        return larger + states + max(copies, default=0)

    def moved_bands(self, now: Sequence[Capacity], then: Sequence[Capacity]) -> int:
        """Bytes held at most while several batches' buffers, one after the other, are moved."""
        held = sum(map(self.reserved, now))
        most = copied = 0
        for i in resize_order(now, then):
            held -= self.reserved(now[i])
            most = max(most, held + self.moved(now[i], then[i]))
            held += self.reserved(then[i])
            copied = max(copied, self.moved(then[i], then[i]) - self.reserved(then[i]))
        return max(most, held + copied)

    def _reserved(self, capacity: Capacity, step: int = 1) -> dict[int | None, int]:
        """Bytes of the attention layers by window."""
        sizes: list[tuple[int | None, int]] = [(None, self.full_bytes)]
        sizes += self.window_bytes.items()
        return {
            window: capacity.rows * _columns(window, capacity.columns, step) * size
            for window, size in sizes
        }

    def used(self, lengths: Iterable[int]) -> int:
        """Bytes that rows of these lengths (tokens) really hold."""
        total = 0
        for length in lengths:
            total += self.row_bytes + length * self.full_bytes
            total += sum(min(length, w) * size for w, size in self.window_bytes.items())
        return total


def _columns(window: int | None, columns: int, step: int = 1) -> int:
    """Columns of a layer's buffers in a batch that holds ``columns`` tokens of each row."""
    return columns if window is None else min(columns, window - 1 + step)
