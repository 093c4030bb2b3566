"""The layers of one step over pages that are called part by part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.packed.split import (
    Again,
    Joint,
    Places,
    SplitLayer,
    SplitPart,
    Within,
    anywhere,
    places,
)
from chairlift.cache.pages.page import column_bound, doubled, step_size
from chairlift.cache.pages.shared_calls import shared_calls
from chairlift.cache.pages.states import RowStates, StateForms, States
from chairlift.cache.pages.step import StepSizes
from chairlift.cache.state import StateLayer

# Prompts of up to this many new tokens share a call; then of up to twice as many, and so on.
SHARED_TOKENS = 64
# Prompts with more tokens in all have calls of their own in dense attention, because a model may
# keep the scores of a call.
SHARED_COLUMNS = 4096
# In dense attention, all rows share one call, as wide as the longest row, unless it has more than
# this many times the columns of separate calls for rows of similar lengths.
MAX_WASTE = 4

# The key of the only group of rows.
_EVEN = 0


class StepRows(NamedTuple):
    """The rows of one batch in a step.

    Attributes:
        states: their states.
        counts: the step's tokens of each row; those behind the rows are unused.
        columns: the tokens of each row after the step.
        prompt: the batch is a prompt; False: its rows may take tokens back.
    """

    states: RowStates
    counts: Sequence[int]
    columns: Sequence[int]
    prompt: bool = False


class PagedAttention(Enum):
    """How a model's attention layers read the pages."""

    # The model calls mlx-lm's function with queries, keys and values: a kernel reads the pages.
    KERNEL = auto()
    # The same for multi-head latent attention: see ``latent``.
    LATENT = auto()
    # The model's own code reads copies of what is in the pages: see ``dense``.
    DENSE = auto()


class Division(NamedTuple):
    """How layers with a cache are called in steps over pages.

    Attributes:
        within: see ``SplitLayer``.
        attention: attention layers are called part by part if it is ``DENSE``; recurrent ones
            always are.
        pads: recurrent layers regard the lengths of rows with padding.
    """

    within: Callable[[], Within] = lambda: anywhere
    attention: PagedAttention = PagedAttention.KERNEL
    pads: bool = False

    @property
    def dense(self) -> bool:
        """Whether attention layers are called part by part."""
        return self.attention is PagedAttention.DENSE


class DenseGroup(NamedTuple):
    """Rows of a step that share a call of each layer with dense attention.

    Attributes:
        places: their tokens.
        columns: an upper bound of each row's tokens after the step.
    """

    places: Places
    columns: int


class Group(NamedTuple):
    """Rows of a step that share a call of each recurrent layer.

    Attributes:
        members: the rows of several prompts, or of one other batch.
        places: their tokens.
        mask: ``[rows, length]``, which tokens of the call are no padding; None: all, or the layers
            do not regard it.
        lengths: ``[rows]``, the number of such tokens; None where ``mask`` is None.
        before: the states before the step.
    """

    members: Sequence[StepRows]
    places: Places
    mask: mx.array | None
    lengths: mx.array | None
    before: States

    @property
    def sizes(self) -> Sequence[int]:
        """The number of arrays of a state, for each recurrent layer."""
        return self.members[0].states.forms.slots


class StepParts:
    """The parts of a step, the states before it, and the calls that compute those after it.

    Args:
        rows: in the order of the step's tokens.
        sizes: those of the step.
        division: how the step is divided.
    """

    def __init__(self, rows: Sequence[StepRows], sizes: StepSizes, division: Division) -> None:
        self._rows = [each for each in rows if each.counts]
        self._tokens = sizes.tokens
        self._column_limit = sizes.column_limit
        self.division = division
        # By group: the layers' caches after the last model call, and functions that repeat it.
        self._called: list[list[StateLayer]] = []
        self._again: list[list[Again]] = []

    @cached_property
    def groups(self) -> list[Group]:
        """The calls of each layer."""
        starts = [0, *accumulate(sum(each.counts) for each in self._rows)]
        batches = [n for n, each in enumerate(self._rows) if not each.prompt]
        prompts = [n for n, each in enumerate(self._rows) if each.prompt]
        lengths = [self._rows[n].counts[0] for n in prompts]
        calls = shared_calls(lengths) if self.division.pads else _equal(lengths)
        members = [[n] for n in batches] + [[prompts[i] for i in call] for call in calls]
        return [
            self._group([self._rows[n] for n in own], [starts[n] for n in own]) for own in members
        ]

    def _group(self, members: Sequence[StepRows], starts: Sequence[int]) -> Group:
        counts = [count for each in members for count in each.counts]
        begins = [
            start + before
            for each, start in zip(members, starts, strict=True)
            for before in np.cumsum([0, *each.counts[:-1]]).tolist()
        ]
        where = places(begins, counts, step_size(len(counts)), self._tokens)
        rows = [row for each in members for row in each.states.rows]
        before = members[0].states.forms.gathered(rows, where.rows)
        mask = lengths = None
        if self.division.pads and where.columns is not None and where.length > 1:
            lengths = mx.array([*counts, *[0] * (where.rows - len(counts))], mx.int32)
            mask = mx.arange(where.length) < lengths[:, None]
        return Group(members, where, mask, lengths, before)

    @cached_property
    def joint(self) -> Joint:
        """Joins the results of all groups."""
        return Joint([group.places for group in self.groups], self._tokens)

    @cached_property
    def dense_groups(self) -> list[DenseGroup]:
        """The calls of each layer with dense attention."""
        groups: dict[Hashable, list[tuple[int, int, int]]] = {}
        start = 0
        for number, each in enumerate(self._rows):
            for count, columns in zip(each.counts, each.columns, strict=True):
                key: Hashable = _EVEN if self._is_even else column_bound(columns)
                if each.prompt:
                    alone = number if columns > SHARED_COLUMNS else None
                    key = alone, doubled(SHARED_TOKENS, count)
                groups.setdefault(key, []).append((start, count, columns))
                start += count
        result = []
        for key, rows in groups.items():
            begins, counts, ends = ([row[i] for row in rows] for i in range(3))
            size, limit = len(rows), max(ends)
            if key == _EVEN:
                size, limit = step_size(size), self._column_limit
            result.append(DenseGroup(places(begins, counts, size, self._tokens), limit))
        return result

    @cached_property
    def dense_joint(self) -> Joint:
        """Joins the results of all ``dense_groups``."""
        return Joint([group.places for group in self.dense_groups], self._tokens)

    @cached_property
    def _is_even(self) -> bool:
        """Whether the rows have one call in dense attention."""
        columns = [columns for each in self._rows if not each.prompt for columns in each.columns]
        width = len(columns) * self._column_limit
        return width <= MAX_WASTE * sum(map(column_bound, columns))

    @property
    def _forms(self) -> StateForms:
        """The forms of states; empty without recurrent layers."""
        return self._rows[0].states.forms

    @property
    def recur(self) -> bool:
        """Whether all steps with this number of rows, of one token each, have this step's form."""
        known = self._forms.known
        even = self._is_even or not self.division.dense
        return known and even and len(self._rows) == 1 and max(self._rows[0].counts) == 1

    def layers(self) -> list[SplitLayer]:
        """The caches of the recurrent layers, for a model's call."""
        self._called, self._again = [], []
        if not self._forms:
            return []
        parts: list[list[SplitPart]] = []
        for group in self.groups:
            caches = [
                StateLayer.of(own, size, group.places.rows, group.lengths)
                for own, size in zip(group.before, group.sizes, strict=True)
            ]
            again: list[Again] = []
            self._called.append(caches)
            self._again.append(again)
            parts.append([SplitPart(group.places, own, group.mask, again.append) for own in caches])
        return [
            SplitLayer(own, self.joint, self.division.within, launches=True)
            for own in zip(*parts, strict=True)
        ]

    def commit(self) -> None:
        """Gives all rows the states after the step."""
        if not self._forms:
            return
        for group, caches, again in zip(self.groups, self._called, self._again, strict=True):
            after = [layer.checkpoint() for layer in caches]
            group.members[0].states.forms.learn(after)
            first = 0
            for states, counts, _, prompt in group.members:
                before = list(states.rows)
                states.write(after, first)
                first += len(counts)
                if max(counts) > 1 and not prompt:
                    exact = group.lengths is not None or min(counts) == max(counts)
                    states.verify(counts[: len(before)], exact, before, again)

    def arrays(self) -> list[list[mx.array]]:
        """The states of each layer before a step that recurs, by slot."""
        if not self._forms:
            return []
        (group,) = self.groups
        return [[slots[name] for name in sorted(slots)] for slots in group.before]

    def traced(self, arrays: Sequence[Sequence[mx.array]]) -> list[SplitLayer]:
        """As ``layers``, with other arrays in place of ``arrays``."""
        if not self._forms:
            return []
        (group,) = self.groups
        caches = []
        for slots, size, own in zip(group.before, group.sizes, arrays, strict=True):
            named = dict(zip(sorted(slots), own, strict=True))
            caches.append(StateLayer.of(named, size, group.places.rows))
        return [SplitLayer([SplitPart(group.places, own)], self.joint) for own in caches]

    def take(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        """Takes the states after a step that recurs, in the form of ``arrays``."""
        layers = self.traced(arrays)
        self._called, self._again = [[layer.parts[0].cache for layer in layers]], [[]]


def _equal(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of the prompts of each length."""
    numbers: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        numbers.setdefault(length, []).append(number)
    return [*numbers.values()]


def written(layers: Sequence[SplitLayer]) -> list[list[mx.array]]:
    """The states after a model's call with the layers of ``StepParts.traced``."""
    parts = [layer.parts[0].cache.checkpoint() for layer in layers]
    return [[slots[name] for name in sorted(slots)] for slots in parts]
