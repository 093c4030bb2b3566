"""The model calls of a step over pages: one call for all rows and prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import mlx.core as mx

from chairlift.cache.kinds import Cache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import step_size
from chairlift.cache.pages.rows import table_widths
from chairlift.engine.model.compiled import CompiledSteps
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.forward import Chunk, Forward, Outcome, packed_tokens, row_runs
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import Run, Slot

# Decode steps are compiled in advance for sequences of up to this many tokens, and later ones when
# they recur.
COMPILED_TOKENS = 8192
# Different tokens of the steps that compile; any vocabulary has so many.
TRIAL_TOKENS = 8


class PagedForward(Forward):
    """Calls a model over pages; see ``Forward``. Steps are padded to recurring sizes."""

    def __init__(self, model: Any, head: Head | None) -> None:
        super().__init__(model, head, packs=True)
        self._steps = CompiledSteps(model)
        self._adapted_steps = CompiledSteps(model, self.routing)

    def __call__(
        self,
        bands: Seq[Cache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot] = (),
        drafted: Seq[DraftedBand] = (),
    ) -> Outcome:
        rows = cast("list[PagedBatch]", [band for band in bands if len(band)])
        runs = row_runs(tokens.shape[0], adapters, drafted)
        counts = [band.counts for band in drafted] if drafted else None
        if not chunks:
            return self._decode(rows, tokens, runs, counts) if rows else Outcome(None, {}, {})
        count = tokens.shape[0]
        padding = step_size(count) - count
        lengths = [len(chunk.tokens) for chunk in chunks]
        prompts = [cast(PagedBatch, chunk.cache) for chunk in chunks]
        new = list(zip(prompts, lengths, strict=True))
        total = count + padding + sum(lengths)
        tail = step_size(total) - total
        runs += [
            *([Run(None, padding)] if padding else []),
            *(Run(chunk.adapter, len(chunk.tokens)) for chunk in chunks),
            *([Run(None, tail)] if tail else []),
        ]
        lengths[-1] += tail
        packed = packed_tokens(count, chunks, lengths, padding)
        with (
            paged_step(rows, new, padding, drafted=counts, tail=tail) as step,
            self.routing.of(runs),
        ):
            fed = _padded(tokens, padding)
            return self._packed_outcome(fed, packed, chunks, step.layers(), step_size)

    def commit(self, drafted: DraftedBand, kept: Seq[int]) -> None:
        cast(PagedBatch, drafted.cache).advance(kept)

    def compile(self, memory: PagedMemory, max_rows: int) -> None:
        """Compiles decode steps of up to ``max_rows`` rows and ``COMPILED_TOKENS`` tokens each.

        The first ones have the most rows, with different tokens: they are compared with others.
        """
        batch = PagedBatch(memory)
        for rows in dict.fromkeys(map(step_size, range(max_rows, 0, -1))):
            for pages in table_widths(COMPILED_TOKENS):
                with paged_step([batch], [], rows, pages) as step:
                    self._steps.compile(step, mx.arange(rows)[:, None] % TRIAL_TOKENS)

    def _decode(
        self,
        rows: Seq[PagedBatch],
        tokens: mx.array,
        runs: list[Run],
        counts: Seq[Seq[int]] | None,
    ) -> Outcome:
        """A step of rows alone, padded so that its shape recurs."""
        padding = step_size(tokens.shape[0]) - tokens.shape[0]
        fed = _padded(tokens, padding)
        with (
            paged_step(rows, [], padding, drafted=counts) as step,
            self.routing.of([*runs, Run(None, padding)] if padding else runs),
        ):
            steps = self._steps if self.routing.call is None else self._adapted_steps
            return Outcome(steps(step, fed[:, None])[:, -1], {}, {})


def _padded(tokens: mx.array, padding: int) -> mx.array:
    return mx.pad(tokens, (0, padding)) if padding else tokens
