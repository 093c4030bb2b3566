"""Decode rows that bring drafts: proposed tokens, which the same model call verifies.

Each row feeds its next token and its draft. The model's token at each of these positions tells
whether the draft's next token is right. The row then keeps the right ones and takes back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import Cache
from chairlift.cache.speculation import Speculation
from chairlift.engine.model.lora_routing import AdapterRun, Routing, Slot
from chairlift.engine.model.vision.token_inputs import Given, TokenInputs, no_inputs


class DraftedBand:
    """The rows of one band in one step.

    Args:
        cache: the band's cache.
        rows: the tokens of each row: its next token, then its draft.
        adapters: the slot of each row's adapter; empty if no row has one.
    """

    def __init__(
        self, cache: Cache, rows: Sequence[Sequence[int]], adapters: Sequence[Slot]
    ) -> None:
        self.cache = cache
        self.rows = rows
        self._adapters = adapters
        # The shift of each row's position by images before it; empty if no row has one.
        self.shifts: Sequence[int] = ()

    @cached_property
    def transaction(self) -> Speculation:
        """The transaction of a cache of columns."""
        return Speculation(cast(BatchCache, self.cache))

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each row."""
        return [len(row) for row in self.rows]

    @property
    def runs(self) -> list[AdapterRun]:
        """The adapter of the tokens, row by row."""
        slots = self._adapters or [None] * len(self.rows)
        return [AdapterRun(slot, count) for slot, count in zip(slots, self.counts, strict=True)]

    def call(self, model: Any, routing: Routing, after: Callable[[mx.array], mx.array]) -> mx.array:
        """Calls a model with these rows alone, padded to the same length.

        Args:
            after: see ``Forward.chained``.

        Returns:
            Logits ``[tokens, vocabulary]``, row by row.
        """
        length = max(self.counts)
        tokens = mx.array([[*row, *[0] * (length - len(row))] for row in self.rows], mx.int32)
        with self.transaction.step(length, self.counts), routing.route(self._padded_runs(length)):
            logits: mx.array = model(after(tokens), cache=self.transaction.layers)
        logits = logits.reshape(-1, logits.shape[-1])
        places = [r * length + i for r, row in enumerate(self.rows) for i in range(len(row))]
        return logits if len(places) == logits.shape[0] else logits[mx.array(places)]

    def commit(
        self, kept: Sequence[int], model: Any, routing: Routing, given: Given = no_inputs
    ) -> None:
        """Keeps the first ``kept[r]`` tokens of row ``r``; the caches are then as if it had fed
        only these.

        Recurrent states that were not saved at these tokens are computed again, by ``model``.

        Args:
            given: see ``VisionModel.given``.
        """

        def replay(start: int, stop: int) -> None:
            tokens = mx.array([row[start:stop] for row in self.rows], mx.int32)
            inputs = [TokenInputs(stop - start, shift) for shift in self.shifts]
            with routing.route(self._padded_runs(stop - start)), given(inputs):
                mx.eval(model(tokens, cache=self.transaction.layers))

        self.transaction.commit(kept, replay)

    def _padded_runs(self, length: int) -> list[AdapterRun]:
        return [AdapterRun(run.slot, length) for run in self.runs]


def row_runs(
    tokens: int, adapters: Sequence[Slot], drafted: Sequence[DraftedBand]
) -> list[AdapterRun]:
    """The adapters of the rows' tokens, of which there are ``tokens``; see ``Forward``."""
    if drafted:
        return [run for band in drafted for run in band.runs]
    return [AdapterRun(slot, 1) for slot in adapters] or [AdapterRun(None, tokens)]
