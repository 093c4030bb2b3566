"""The model calls of a step over pages: one call for all rows and prompt chunks.

Most calls are compiled: see ``CompiledSteps``. Those that need more than logits to sample from, and
those of prompts with adapters, are not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import mlx.core as mx

from chairlift.cache.kinds import Cache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import doubled, page_count, step_size
from chairlift.cache.pages.rows import table_widths
from chairlift.engine.model.compiled import CompiledSteps
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.forward import (
    Chunk,
    Forward,
    Outcome,
    packed_tokens,
    padded_positions,
    row_runs,
)
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import Run, Slot

# Steps are compiled in advance for sequences of up to this many tokens, and later ones when they
# recur. Tables of steps with prompts are at least so wide.
COMPILED_TOKENS = 8192
MIN_PAGES = page_count(COMPILED_TOKENS)
# Different tokens of the steps that compile; any vocabulary has so many.
TRIAL_TOKENS = 8
# A step with prompts or drafts has the shape of one with so many tokens of rows; with more, of one
# with twice as many, and so on.
ROWS = 64


class PagedForward(Forward):
    """Calls a model over pages; see ``Forward``. Steps are padded to recurring sizes."""

    def __init__(self, model: Any, head: Head | None) -> None:
        super().__init__(model, head, packs=True)
        # Steps in which each row takes a token, and steps with prompts or drafts; each of them
        # without adapters, and with.
        self._steps = CompiledSteps(self._logits)
        self._adapted_steps = CompiledSteps(self._logits, self.routing)
        self._mixed_steps = CompiledSteps(self._logits)
        self._adapted_mixed_steps = CompiledSteps(self._logits, self.routing)

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
        if chunks or drafted:
            counts = [band.counts for band in drafted] if drafted else None
            return self._mixed(rows, tokens, chunks, runs, counts)
        if not rows:
            return Outcome(None, {}, {})
        padding = step_size(tokens.shape[0]) - tokens.shape[0]
        fed = mx.pad(tokens, (0, padding)) if padding else tokens
        with (
            paged_step(rows, [], padding) as step,
            self.routing.of([*runs, Run(None, padding)] if padding else runs),
        ):
            steps = self._steps if self.routing.call is None else self._adapted_steps
            return Outcome(steps(step, fed[:, None], None), {}, {})

    def commit(self, drafted: DraftedBand, kept: Seq[int]) -> None:
        cast(PagedBatch, drafted.cache).advance(kept)

    def compile(self, memory: PagedMemory, max_rows: int, draft_tokens: int, tokens: int) -> None:
        """Compiles steps in advance.

        The first ones of each kind have the most tokens, which differ: they are compared with
        others.

        Args:
            max_rows: the most rows of a step.
            draft_tokens: the most tokens of a row's draft.
            tokens: the most tokens of a step.
        """
        batch = PagedBatch(memory)
        for rows in dict.fromkeys(map(step_size, range(max_rows, 0, -1))):
            for pages in table_widths(COMPILED_TOKENS):
                with paged_step([batch], [], rows, pages) as step:
                    self._steps.compile(step, mx.arange(rows)[:, None] % TRIAL_TOKENS, None)
        most = min(tokens, max_rows * (1 + draft_tokens))
        for size in dict.fromkeys(map(step_size, range(tokens, 0, -1))):
            for limit in dict.fromkeys(_row_limit(rows, size) for rows in range(most, 0, -1)):
                self._compile_mixed(memory, size, limit)

    def _compile_mixed(self, memory: PagedMemory, tokens: int, row_limit: int) -> None:
        """Compiles a step with a short prompt, whose other tokens are unused."""
        prompt = PagedBatch(memory)
        prompt.join()
        count = min(tokens, TRIAL_TOKENS)
        new, tail = [(prompt, count)], tokens - count
        with paged_step([], new, 0, MIN_PAGES, tail=tail, row_limit=row_limit) as step:
            numbers = mx.arange(tokens)[:, None] % TRIAL_TOKENS
            self._mixed_steps.compile(step, numbers, numbers[:row_limit, 0])
        prompt.reset()

    def _mixed(
        self,
        rows: Seq[PagedBatch],
        tokens: mx.array,
        chunks: Seq[Chunk],
        runs: Seq[Run],
        counts: Seq[Seq[int]] | None,
    ) -> Outcome:
        """A step with chunks, or rows with drafts.

        Args:
            counts: the tokens of each row, which stay uncounted; None: each row takes one.
        """
        lengths = [len(chunk.tokens) for chunk in chunks]
        new = [(cast(PagedBatch, chunk.cache), len(chunk.tokens)) for chunk in chunks]
        total = tokens.shape[0] + sum(lengths)
        size = step_size(total)
        tail = size - total
        packed = packed_tokens(tokens.shape[0], chunks, lengths, tail)
        row_limit = _row_limit(packed.sampled, size)
        runs = [
            *runs,
            *(Run(chunk.adapter, len(chunk.tokens)) for chunk in chunks),
            *([Run(None, tail)] if tail else []),
        ]
        plain = any(chunk.scored or chunk.pooled for chunk in chunks)
        with (
            paged_step(rows, new, 0, MIN_PAGES, counts, tail, row_limit) as step,
            self.routing.of(runs),
        ):
            adapted = self.routing.call is not None
            if plain or (adapted and chunks):
                return self._packed_outcome(tokens, packed, chunks, step.layers(), step_size)
            steps = self._adapted_mixed_steps if adapted else self._mixed_steps
            fed = mx.concatenate([tokens, mx.array(packed.new, mx.int32)])[:, None]
            logits = steps(step, fed, padded_positions(packed, row_limit))
        if not packed.sampled:
            step.memory.effects = [logits]
            return Outcome(None, {}, {})
        return Outcome(logits[: step_size(packed.sampled)], {}, {})

    def _logits(self, tokens: mx.array, layers: Seq[Any], positions: mx.array | None) -> mx.array:
        """See ``ModelCall``."""
        if positions is not None:
            return self._logits_at(tokens, layers, positions)[0]
        logits: mx.array = self._model(tokens, cache=layers)
        return logits[:, -1]


def _row_limit(rows: int, tokens: int) -> int:
    """The ``StepTokens.row_limit`` of a step with prompts or drafts."""
    return min(tokens, doubled(ROWS, rows))
