"""The states of recurrent layers, for the rows of a batch over pages.

They are not in pages: a state has one size, whatever the length of its sequence. The arrays of a
step have a line for each row and perhaps unused lines behind them, so that their sizes recur.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.packed.split import Again
from chairlift.cache.snapshot import StatePiece
from chairlift.cache.state import Slots, StateLayer, padded_alike

# The states of all layers: for each layer, arrays ``[lines, ...]`` by slot.
States = Sequence[Slots]


class Line(NamedTuple):
    """The place of a row's states: a line of the arrays of all layers."""

    states: States
    number: int


class _Verified(NamedTuple):
    """A step whose rows may take tokens back.

    Attributes:
        counts: the tokens of each row.
        exact: the states after the step are those after so many tokens; False: after padding.
        before: the rows' states before the step.
        again: for each layer, repeats its call.
    """

    counts: Sequence[int]
    exact: bool
    before: Sequence[Line]
    again: Sequence[Again]


class StateForms:
    """The forms of the states of all recurrent layers, which all batches of a memory share.

    Args:
        slots: for each layer, the number of arrays of a state, if known.

    Attributes:
        zeros: a state of zeros, with one line; without arrays before the first step.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = slots
        self.zeros: States = [{} for _ in slots]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def known(self) -> bool:
        """Whether there has been a step."""
        return all(self.zeros)

    def learn(self, states: States) -> None:
        """Takes the forms from the states after a step."""
        if not self.known:
            self.zeros = [{name: mx.zeros_like(x[:1]) for name, x in own.items()} for own in states]

    def gathered(self, rows: Sequence[Line], lines: int) -> list[Slots]:
        """The states of rows, in order, then copies of the first up to ``lines`` lines."""
        sources = {id(row.states): row.states for row in rows} or {id(self.zeros): self.zeros}
        sizes = [max((_lines(own) for own in states), default=1) for states in sources.values()]
        firsts = dict(zip(sources, accumulate([0, *sizes]), strict=False))
        order = [firsts[id(row.states)] + row.number for row in rows]
        order += [order[0] if order else 0] * (lines - len(rows))
        chosen: mx.array | slice | None = mx.array(order)
        if order == [*range(lines)]:
            chosen = None if sizes == [lines] else slice(lines)
        layers = zip(*sources.values(), strict=True)
        return [
            _chosen(own, sizes, zeros, chosen)
            for own, zeros in zip(layers, self.zeros, strict=True)
        ]


class RowStates:
    """The states of a batch's rows, in all recurrent layers.

    Args:
        forms: those of the batch's memory.
    """

    def __init__(self, forms: StateForms) -> None:
        self.forms = forms
        self.rows: list[Line] = []
        self._verified: _Verified | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of all rows, to be evaluated after a step: logits may not depend on them."""
        states = {id(row.states): row.states for row in self.rows}.values()
        return [array for layers in states for own in layers for array in own.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' states, without unused lines and those of other batches."""
        states = [own for row in self.rows for own in row.states]
        return sum(x.nbytes // x.shape[0] for own in states for x in own.values())

    def join(self, pieces: Sequence[StatePiece | None]) -> None:
        """Adds a row with its state in each layer; None is the state before the first token."""
        states = [dict(_written(piece)) if piece else {} for piece in pieces]
        self.rows.append(Line(states, 0))

    def arrange(self, order: Sequence[int]) -> None:
        """Keeps the rows numbered ``order``, in that order."""
        self.rows = [self.rows[row] for row in order]

    def get(self, row: int) -> list[StatePiece | None]:
        """One row's state in each layer; None before its first step."""
        states, number = self.rows[row]
        return [
            _piece(own, size, number) if own else None
            for own, size in zip(states, self.forms.slots, strict=True)
        ]

    def write(self, states: States, first: int = 0) -> None:
        """Takes the states after a step: row ``r`` has the line ``first + r``."""
        self.rows = [Line(states, first + row) for row in range(len(self.rows))]

    def verify(
        self, counts: Sequence[int], exact: bool, before: Sequence[Line], again: Sequence[Again]
    ) -> None:
        """Lets rows take back tokens of the last step until the next ``keep``.

        Args:
            counts: the tokens of each row.
            exact: see ``_Verified``.
            before: the rows before that step.
            again: for each layer, repeats its call.
        """
        self._verified = _Verified(counts, exact, before, again)

    def keep(self, kept: Sequence[int]) -> None:
        """Keeps the first ``kept[r]`` tokens that row ``r`` had in the last step.

        States after another number of tokens are computed again.
        """
        verified, self._verified = self._verified, None
        if verified is None or (verified.exact and list(kept) == list(verified.counts)):
            return
        self.rows = list(verified.before)
        for length in sorted(set(kept) - {0}):
            chosen = [row for row, keep in enumerate(kept) if keep == length]
            before = self.forms.gathered([verified.before[row] for row in chosen], len(chosen))
            layers = [
                StateLayer.of(own, size, len(chosen))
                for own, size in zip(before, self.forms.slots, strict=True)
            ]
            for again, layer in zip(verified.again, layers, strict=True):
                again(layer, chosen, length)
            after = [layer.checkpoint() for layer in layers]
            for number, row in enumerate(chosen):
                self.rows[row] = Line(after, number)


def _written(piece: StatePiece) -> list[tuple[int, mx.array]]:
    return [(slot, array) for slot, array in enumerate(piece.slots) if array is not None]


def _piece(slots: Slots, size: int, line: int) -> StatePiece:
    own = (slots.get(name) for name in range(max(size, 1 + max(slots))))
    return StatePiece(tuple(None if array is None else array[line : line + 1] for array in own))


def _lines(slots: Slots) -> int:
    return next((array.shape[0] for array in slots.values()), 1)


def _chosen(
    sources: Sequence[Slots],
    sizes: Sequence[int],
    zeros: Slots,
    chosen: mx.array | slice | None,
) -> Slots:
    """Some lines of one layer's states in several arrays; None: all. Missing arrays are zeros."""
    result = {}
    for name in sorted({slot for slots in (*sources, zeros) for slot in slots}):
        arrays = [slots.get(name) for slots in sources]
        like = next((x for x in arrays if x is not None), zeros.get(name))
        assert like is not None
        parts = [
            mx.zeros((size, *like.shape[1:]), like.dtype) if x is None else x
            for x, size in zip(arrays, sizes, strict=True)
        ]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(padded_alike(parts))
        result[name] = joined if chosen is None else joined[chosen]
    return result
