"""The model calls of a step over pages: one call for all rows and prompt chunks.

Steps of rows alone are compiled. A few prompt tokens, as behind a cached prefix, are computed like
the tokens of rows, so that their step is one of those: any other step with prompts takes the host
several milliseconds longer to launch.
"""

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
# A step's prompt tokens are computed like those of rows if there are at most so many, and if they
# see at most so many columns: each of them reads its columns by itself.
FEW_TOKENS, FEW_COLUMNS = 64, 1 << 16


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
        shifts: Seq[int] = (),  # models that see have columns
    ) -> Outcome:
        rows = cast("list[PagedBatch]", [band for band in bands if len(band)])
        runs = row_runs(tokens.shape[0], adapters, drafted)
        counts = [band.counts for band in drafted] if drafted else None
        if not chunks:
            if not rows:
                return Outcome(None, {}, {})
            return Outcome(self._decode(rows, tokens, runs, counts), {}, {})
        if _few(tokens, chunks):
            return self._with_few(rows, tokens, chunks, runs, counts)
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

        Steps with up to ``FEW_TOKENS`` prompt tokens have these shapes, too. The first ones have
        the most tokens, which differ: they are compared with others.
        """
        batch = PagedBatch(memory)
        for rows in dict.fromkeys(map(step_size, range(max_rows + FEW_TOKENS, 0, -1))):
            for pages in table_widths(COMPILED_TOKENS):
                with paged_step([batch], [], rows, pages) as step:
                    self._steps.compile(step, mx.arange(rows)[:, None] % TRIAL_TOKENS)

    def _with_few(
        self,
        rows: Seq[PagedBatch],
        tokens: mx.array,
        chunks: Seq[Chunk],
        runs: list[Run],
        counts: Seq[Seq[int]] | None,
    ) -> Outcome:
        """A step in which chunks are computed like rows with as many tokens."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        packed = packed_tokens(tokens.shape[0], chunks, lengths)
        fed = mx.concatenate([tokens, mx.array(packed.new, mx.int32)])
        runs = [*runs, *(Run(chunk.adapter, len(chunk.tokens)) for chunk in chunks)]
        plain = [[1] * len(batch) for batch in rows]
        prompts = [cast(PagedBatch, chunk.cache) for chunk in chunks]
        own = [*(plain if counts is None else counts), *([length] for length in lengths)]
        logits = self._decode([*rows, *prompts], fed, runs, own)
        for batch, new in zip(rows, plain, strict=True) if counts is None else ():
            batch.advance(new)
        for prompt, length in zip(prompts, lengths, strict=True):
            prompt.advance([length])
        if any(chunk.choices for chunk in chunks):
            padding = step_size(packed.sampled) - packed.sampled
            logits = logits[mx.array(packed.positions + [0] * padding, mx.int32)]
        return Outcome(logits, {}, {})

    def _decode(
        self,
        rows: Seq[PagedBatch],
        tokens: mx.array,
        runs: list[Run],
        counts: Seq[Seq[int]] | None,
    ) -> mx.array:
        """The logits of a step without chunks, padded so that its shape recurs.

        Args:
            counts: the tokens of each row, which stay uncounted; None: each row takes one.
        """
        padding = step_size(tokens.shape[0]) - tokens.shape[0]
        fed = _padded(tokens, padding)
        with (
            paged_step(rows, [], padding, drafted=counts) as step,
            self.routing.of([*runs, Run(None, padding)] if padding else runs),
        ):
            steps = self._steps if self.routing.call is None else self._adapted_steps
            return steps(step, fed[:, None])[:, -1]


def _few(tokens: mx.array, chunks: Seq[Chunk]) -> bool:
    """Whether chunks are computed like rows; the step must have logits that are sampled."""
    if any(chunk.scored or chunk.pooled for chunk in chunks):
        return False
    lengths = [len(chunk.tokens) for chunk in chunks]
    seen = (
        length * (chunk.cache.offsets[0] + length)
        for chunk, length in zip(chunks, lengths, strict=True)
    )
    sampled = tokens.shape[0] or any(chunk.choices for chunk in chunks)
    return bool(sampled) and sum(lengths) <= FEW_TOKENS and sum(seen) <= FEW_COLUMNS


def _padded(tokens: mx.array, padding: int) -> mx.array:
    return mx.pad(tokens, (0, padding)) if padding else tokens
