"""The recurrent layers in one step over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.packed.split import Again, Places, SplitLayer, SplitPart, Within, places
from chairlift.cache.pages.page import step_size
from chairlift.cache.pages.states import RowStates
from chairlift.cache.state import Slots, StateLayer


class StepRows(NamedTuple):
    """Some of a step's rows, which share a call of each recurrent layer.

    Attributes:
        states: their states in each recurrent layer.
        counts: the step's tokens of each row; those behind the rows are unused.
    """

    states: Sequence[RowStates]
    counts: Sequence[int]


class StepStates:
    """The states before a step, and the calls that replace them by those after it.

    Args:
        rows: in the order of the step's tokens.
        within: see ``SplitLayer``.
    """

    def __init__(
        self, rows: Sequence[StepRows], within: Callable[[], Within] | None = None
    ) -> None:
        self._rows = [each for each in rows if each.counts]
        self._within = within

    @cached_property
    def _places(self) -> list[Places]:
        start, result = 0, []
        for _, counts in self._rows:
            result.append(places(start, counts, step_size(len(counts))))
            start = result[-1].stop
        return result

    @cached_property
    def _before(self) -> list[list[Slots]]:
        """The states of each layer, for each of the rows."""
        return [
            [own.settled(where.rows) for own, where in zip(layer, self._places, strict=True)]
            for layer in zip(*(states for states, _ in self._rows), strict=True)
        ]

    @property
    def recur(self) -> bool:
        """Whether a step has one call of each layer, whose form recurs: a token for each row."""
        return len(self._rows) == 1 and max(self._rows[0].counts) == 1

    def layers(self) -> list[SplitLayer]:
        """The caches of the recurrent layers, for a model's call."""
        return [self._layer(number, before) for number, before in enumerate(self._before)]

    def arrays(self) -> list[list[mx.array]]:
        """The states of each layer before a step that recurs, by slot."""
        return [[slots[name] for name in sorted(slots)] for (slots,) in self._before]

    def of(self, arrays: Sequence[Sequence[mx.array]]) -> list[SplitLayer]:
        """As ``layers``, with other arrays in place of ``arrays``; no states are replaced."""
        (where,) = self._places
        layers = []
        for (slots,), own in zip(self._before, arrays, strict=True):
            named = dict(zip(sorted(slots), own, strict=True))
            layers.append(SplitLayer([SplitPart(where, StateLayer.of(named, where.rows))]))
        return layers

    def write(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        """Takes the states after a step that recurs, in the form of ``arrays``."""
        for states, (slots,), own in zip(self._rows[0].states, self._before, arrays, strict=True):
            states.write(dict(zip(sorted(slots), own, strict=True)))

    def _layer(self, number: int, before: Sequence[Slots]) -> SplitLayer:
        parts = []
        for (states, counts), where, slots in zip(self._rows, self._places, before, strict=True):
            layer = StateLayer.of(slots, where.rows)
            called = partial(_called, states[number], counts, slots, layer)
            parts.append(SplitPart(where, layer, called))
        return SplitLayer(parts, *([self._within] if self._within else []))


def _called(
    states: RowStates, counts: Sequence[int], before: Slots, layer: StateLayer, again: Again
) -> None:
    """Takes the states after a call of a layer."""
    states.write(layer.checkpoint())
    if max(counts) > 1:
        states.verify(counts, before, again)


def written(layers: Sequence[SplitLayer]) -> list[list[mx.array]]:
    """The states after a model's call with the layers of ``StepStates.of``."""
    parts = [layer.parts[0].cache.checkpoint() for layer in layers]
    return [[slots[name] for name in sorted(slots)] for slots in parts]
