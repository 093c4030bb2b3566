"""The states of one recurrent layer, for the rows of a batch over pages.

They are not in pages: a state has one size, whatever the length of its sequence. The arrays of a
step have a line for each row and perhaps unused lines behind them, so that their sizes recur.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.packed.split import Again
from chairlift.cache.snapshot import StatePiece
from chairlift.cache.state import Slots, StateLayer, padded_alike

# The state before the first token.
_NONE: Slots = {}


class _Line(NamedTuple):
    """Where a row's state is: a line of arrays ``[lines, ...]`` by slot."""

    slots: Slots
    number: int


class _Verified(NamedTuple):
    """A step whose rows may take tokens back.

    Attributes:
        counts: the tokens of each row.
        before: the states before the step, row by row.
        again: repeats the layer's call.
    """

    counts: Sequence[int]
    before: Slots
    again: Again


class RowStates:
    """The states of one layer.

    Args:
        slots: the number of arrays of a state, if known.
        template: a state of zeros, ``[1, ...]`` by slot, which all batches of a memory share; empty
            before the first step.
    """

    def __init__(self, slots: int, template: dict[int, mx.array]) -> None:
        self._size = slots
        self._template = template
        self._rows: list[_Line] = []
        self._verified: _Verified | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of all rows, to be evaluated after a step: logits may not depend on them."""
        return [array for slots in _sources(self._rows) for array in slots.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def join(self, piece: StatePiece | None) -> None:
        """Adds a row; None is the state before the first token."""
        slots = enumerate(piece.slots if piece else ())
        own = {slot: array for slot, array in slots if array is not None}
        self._rows.append(_Line(own or _NONE, 0))

    def arrange(self, order: Sequence[int]) -> None:
        """Keeps the rows numbered ``order``, in that order."""
        self._rows = [self._rows[row] for row in order]

    def get(self, row: int) -> StatePiece | None:
        """One row's state; None before its first step."""
        slots, line = self._rows[row]
        if not slots:
            return None
        names = range(max(self._size, 1 + max(slots)))
        own = (slots.get(name) for name in names)
        return StatePiece(tuple(None if x is None else x[line : line + 1] for x in own))

    def settled(self, lines: int) -> Slots:
        """The states of all rows, in order, in arrays with so many lines."""
        return _gathered(self._rows, lines, self._template)

    def write(self, slots: Slots) -> None:
        """Takes the states after a step: row ``r`` has the line ``r``."""
        self._rows = [_Line(slots, row) for row in range(len(self._rows))]
        if not self._template:
            self._template.update({slot: mx.zeros_like(x[:1]) for slot, x in slots.items()})

    def verify(self, counts: Sequence[int], before: Slots, again: Again) -> None:
        """Lets rows take tokens back until the next ``keep``.

        Args:
            counts: the tokens of each row in the last step.
            before: the result of ``settled`` before that step.
            again: repeats the layer's call.
        """
        self._verified = _Verified(counts, before, again)

    def keep(self, kept: Sequence[int]) -> None:
        """Keeps the first ``kept[r]`` tokens that row ``r`` had in the last step.

        If some rows keep or had fewer than others, the states are computed again.
        """
        verified, self._verified = self._verified, None
        if verified is None or set(kept) == {max(verified.counts)}:
            return
        self._rows = [_Line(verified.before or _NONE, row) for row in range(len(kept))]
        for length in sorted(set(kept) - {0}):
            chosen = [row for row, keep in enumerate(kept) if keep == length]
            before = [self._rows[row] for row in chosen]
            slots = _gathered(before, len(chosen), self._template)
            layer = StateLayer.of(slots, len(chosen))
            verified.again(layer, chosen, length)
            after = layer.checkpoint()
            for number, row in enumerate(chosen):
                self._rows[row] = _Line(after, number)


def _sources(rows: Sequence[_Line]) -> list[Slots]:
    """The different arrays in which rows have their states."""
    return list({id(row.slots): row.slots for row in rows}.values())


def _gathered(rows: Sequence[_Line], lines: int, template: Slots) -> Slots:
    """The states of rows, in order, then copies of the first up to ``lines`` lines."""
    sources = _sources(rows) or [_NONE]
    names = sorted({slot for slots in (*sources, template) for slot in slots})
    sizes = [max((x.shape[0] for x in slots.values()), default=1) for slots in sources]
    firsts = dict(zip(map(id, sources), _starts(sizes), strict=True))
    order = [firsts[id(row.slots)] + row.number for row in rows]
    order += [order[0] if order else 0] * (lines - len(rows))
    if order == [*range(lines)] and sizes == [lines]:
        order = []
    return {
        name: _chosen([slots.get(name) for slots in sources], sizes, template.get(name), order)
        for name in names
    }


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _chosen(
    arrays: Sequence[mx.array | None],
    sizes: Sequence[int],
    template: mx.array | None,
    order: Sequence[int],
) -> mx.array:
    """The lines ``order`` of some arrays joined; empty: all. Missing arrays are zeros."""
    like = next((x for x in arrays if x is not None), template)
    assert like is not None
    parts = [
        mx.zeros((size, *like.shape[1:]), like.dtype) if x is None else x
        for x, size in zip(arrays, sizes, strict=True)
    ]
    joined = parts[0] if len(parts) == 1 else mx.concatenate(padded_alike(parts))
    if not order:
        return joined
    if list(order) == [*range(len(order))]:
        return joined[: len(order)]
    return joined[mx.array(list(order))]
