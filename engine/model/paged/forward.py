"""The model calls of a step over pages: one call for all rows and prompt chunks.

Most calls are compiled: see ``CompiledSteps``. Those that need more than logits to sample from,
those with tokens of images, and those of long prompts with adapters, are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, cast

import mlx.core as mx

from chairlift.cache.kinds import Cache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import PagedStep, paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import column_bounds, step_size
from chairlift.cache.pages.step_parts import Division, PagedAttention
from chairlift.cache.pages.upload import HostBuffers, Numbers, uploaded
from chairlift.engine.model.chunk import Chunk, PackedTokens, packed_tokens
from chairlift.engine.model.drafted import DraftedBand, row_runs
from chairlift.engine.model.forward import Forward, ForwardOutput
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import AdapterRun, Slot
from chairlift.engine.model.paged import inputs
from chairlift.engine.model.paged.compiled import BuiltStep, CompiledSteps, StepForm
from chairlift.engine.model.paged.inputs import (
    RowTokens,
    are_few,
    fed_step,
    have_images,
    padded_positions,
    rows_bound,
)
from chairlift.engine.model.vision.token_inputs import TokenInputs

# Steps are compiled in advance for rows of up to this many tokens, and later ones when they recur.
# Steps with chunks launch what rows of this many tokens need, also if all rows are shorter; prompts
# may have any length.
COMPILED_TOKENS = 8192
# Different tokens of the steps that compile; any vocabulary has at least this many.
TRIAL_TOKENS = 8


class PagedForward(Forward):
    """Calls a model over pages; see ``Forward``. Steps are padded to recurring sizes.

    Args:
        attention: how attention layers read the pages; see ``Forward`` for what ``DENSE`` splits.

    Attributes:
        pads: see ``Division``.
    """

    def __init__(
        self,
        model: Any,
        head: Head | None,
        max_pairs: int | None = None,
        attention: PagedAttention = PagedAttention.KERNEL,
    ) -> None:
        splits = attention is PagedAttention.DENSE
        super().__init__(model, head, packs=True, max_pairs=max_pairs, splits=splits)
        self.attention = attention
        self.pads = False
        # The form of the last step; one of the same form, built ahead; and this once it has the
        # numbers of a step.
        self._form: tuple[CompiledSteps, StepForm] | None = None
        self._ahead: BuiltStep | None = None
        self._built: BuiltStep | None = None
        # Steps whose tokens are computed one by one, and steps with chunks: prompts, or rows with
        # drafts. Each of them without adapters, and with.
        compiled = partial(
            CompiledSteps, self._logits, wait_dispatched=lambda: self.wait_dispatched()
        )
        self._steps = compiled()
        self._adapted_steps = compiled(self.routing)
        self._chunk_steps = compiled()
        self._adapted_chunk_steps = compiled(self.routing)

    def __call__(
        self,
        bands: Seq[Cache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot] = (),
        drafted: Seq[DraftedBand] = (),
        shifts: Seq[int] = (),  # none: see ``VisionModel.is_placed``
    ) -> ForwardOutput:
        rows = cast("list[PagedBatch]", [band for band in bands if len(band)])
        if not rows and not chunks:
            return ForwardOutput(None, {}, {})
        if self.splits or adapters:
            self.wait_dispatched()
        if self.splits and (parts := self._parts_of(chunks)):
            return self._by_part(bands, tokens, chunks, parts, adapters, drafted)
        runs = row_runs(tokens.shape[0], adapters, drafted)
        counts = [band.counts for band in drafted] if drafted else None
        few = are_few(rows, counts, chunks) and not have_images(chunks)
        compute = self._one_by_one if few else self._with_chunks
        known = [token for band in drafted for row in band.rows for token in row]
        return compute(rows, known or tokens, chunks, runs, counts)

    def _parts_of(self, chunks: Seq[Chunk]) -> dict[int, list[Chunk]]:
        """The parts of chunks that have too many pairs for one call, by chunk number."""
        parts = {}
        for number, chunk in enumerate(chunks):
            size, count = self._call_tokens(chunk), len(chunk.tokens)
            if size < count:
                starts = range(0, count, size)
                parts[number] = [chunk.part(start, start + size) for start in starts]
        return parts

    def _by_part(
        self,
        bands: Seq[Cache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        parts: Mapping[int, Seq[Chunk]],
        adapters: Seq[Slot],
        drafted: Seq[DraftedBand],
    ) -> ForwardOutput:
        """A step in which the first ``parts`` of some chunks have calls of their own."""
        results: dict[int, list[ForwardOutput]] = {}
        for number, own in parts.items():
            results[number] = []
            for part in own[:-1]:
                outcome = self([], tokens[:0], [part])
                # The scores of this call are freed before those of the next are allocated.
                mx.eval(part.cache.state, *outcome.scored.values(), *outcome.hidden.values())
                results[number].append(outcome)
        last = [parts[n][-1] if n in parts else chunk for n, chunk in enumerate(chunks)]
        logits, scored, hidden = self(bands, tokens, last, adapters, drafted)
        for number, outcomes in results.items():
            for whole, before in (
                (scored, [outcome.scored for outcome in outcomes]),
                (hidden, [outcome.hidden for outcome in outcomes]),
            ):
                arrays = [array for each in before for array in each.values()]
                if arrays:
                    own_last = [whole[number]] if number in whole else []
                    whole[number] = mx.concatenate([*arrays, *own_last])
        return ForwardOutput(logits, scored, hidden)

    @property
    def _division(self) -> Division:
        return Division(self.routing.within, self.attention, self.pads)

    def commit(self, drafted: DraftedBand, kept: Seq[int]) -> None:
        cast(PagedBatch, drafted.cache).advance(kept)

    def build_ahead(self) -> None:
        if self._form is not None:
            steps, form = self._form
            self._ahead = steps.build(form)

    def _keep_form(
        self, steps: CompiledSteps, step: PagedStep, tokens: RowTokens, positions: mx.array | None
    ) -> None:
        """Remembers the form of a step for ``build_ahead``, if the host knows its tokens."""
        self._form = None
        if isinstance(tokens, list) and step.parts is None:
            positioned = positions is not None
            self._form = steps, StepForm(step.memory, step.attention, step.numbers, positioned)

    def _upload(self, parts: Seq[Numbers], buffers: HostBuffers) -> Seq[mx.array]:
        """Copies a step's numbers to the device, for the step that was built ahead if they fit."""
        built, self._ahead, self._built = self._ahead, None, None
        if built is None:
            return uploaded(parts, buffers)
        if not built.upload.refill(parts):
            built.upload.drop()
            return uploaded(parts, buffers)
        self._built = built
        return built.upload.arrays

    def _take_built(self) -> BuiltStep | None:
        built, self._built = self._built, None
        return built

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
        if memory.forms_of_states:
            self._make_states(batch)
        for rows in dict.fromkeys(map(step_size, range(max_rows + inputs.FEW_TOKENS, 0, -1))):
            for columns in column_bounds(COMPILED_TOKENS):
                with paged_step([batch], [], rows, columns, division=self._division) as step:
                    self._steps.compile(step, mx.arange(rows)[:, None] % TRIAL_TOKENS, None)
        if self.splits or memory.forms_of_states:
            return  # the calls of layers in steps with chunks have no recurring form
        most = min(tokens, max_rows * (1 + draft_tokens))
        for size in dict.fromkeys(map(step_size, range(tokens, 0, -1))):
            for limit in dict.fromkeys(rows_bound(rows, size) for rows in range(most, 0, -1)):
                self._compile_chunks(memory, size, limit)

    def _make_states(self, batch: PagedBatch) -> None:
        """Computes a step of unused tokens, after which the forms of states are known."""
        with paged_step([batch], [], 1, division=self._division) as step:
            mx.eval(self._logits(mx.zeros((1, 1), mx.int32), step.layers(), None))

    def _compile_chunks(self, memory: PagedMemory, tokens: int, row_limit: int) -> None:
        """Compiles a step with a short prompt, whose other tokens are unused."""
        prompt = PagedBatch(memory)
        prompt.join()
        count = min(tokens, TRIAL_TOKENS)
        step_with = partial(paged_step, tail=tokens - count, row_limit=row_limit)
        step_with = partial(step_with, division=self._division)
        with step_with([], [(prompt, count)], 0, COMPILED_TOKENS) as step:
            numbers = mx.arange(tokens)[:, None] % TRIAL_TOKENS
            self._chunk_steps.compile(step, numbers, numbers[:row_limit, 0])
        prompt.reset()

    def _one_by_one(
        self,
        rows: Seq[PagedBatch],
        tokens: RowTokens,
        chunks: Seq[Chunk],
        runs: Seq[AdapterRun],
        counts: Seq[Seq[int]] | None,
    ) -> ForwardOutput:
        """A step in which each token reads its columns by itself; arguments as ``_with_chunks``."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        packed = packed_tokens(len(tokens), chunks, lengths)
        prompts = [cast(PagedBatch, chunk.cache) for chunk in chunks]
        plain = [[1] * len(batch) for batch in rows]
        own = [*(counts or plain), *([length] for length in lengths)]
        padding = step_size(len(tokens) + sum(lengths)) - len(tokens) - sum(lengths)
        runs = [*runs, *(AdapterRun(chunk.adapter, len(chunk.tokens)) for chunk in chunks)]
        more = [packed.new + [0] * padding, []]
        if any(chunk.choices for chunk in chunks):
            more[1] = padded_positions(packed, step_size(packed.sampled))
        batches = [*rows, *prompts]
        step_with = partial(
            paged_step,
            *(batches, [], padding, 0, own),
            alone=True,
            prompts=len(prompts),
            division=self._division,
            upload=self._upload,
        )
        with (
            fed_step(step_with, tokens, more) as (step, fed, positions),
            self.routing.route([*runs, AdapterRun(None, padding)] if padding else runs),
        ):
            steps = self._steps if self.routing.call is None else self._adapted_steps
            logits = steps(step, fed, None, self._take_built())
        self._keep_form(steps, step, tokens, None)
        for batch, new in zip(rows, plain, strict=True) if counts is None else ():
            batch.advance(new)
        for prompt, length in zip(prompts, lengths, strict=True):
            prompt.advance([length])
        if positions.size:
            logits = logits[positions]
        return _outcome(logits, packed, step)

    def _with_chunks(
        self,
        rows: Seq[PagedBatch],
        tokens: RowTokens,
        chunks: Seq[Chunk],
        runs: Seq[AdapterRun],
        counts: Seq[Seq[int]] | None,
    ) -> ForwardOutput:
        """A step in which the tokens of a prompt, and those of a row with a draft, are a chunk.

        Args:
            tokens: those of the rows.
            counts: the tokens of each row, which stay uncounted; None: each row takes one.
        """
        lengths = [len(chunk.tokens) for chunk in chunks]
        new = [(cast(PagedBatch, chunk.cache), len(chunk.tokens)) for chunk in chunks]
        total = len(tokens) + sum(lengths)
        size = step_size(total)
        tail = size - total
        packed = packed_tokens(len(tokens), chunks, lengths, tail)
        row_limit = rows_bound(packed.sampled, size)
        runs = [
            *runs,
            *(AdapterRun(chunk.adapter, len(chunk.tokens)) for chunk in chunks),
            *([AdapterRun(None, tail)] if tail else []),
        ]
        given = [chunk.inputs(len(chunk.tokens), len(chunk.tokens)) for chunk in chunks]
        plain = not all(each.is_plain for each in given)
        plain |= any(chunk.scored or chunk.pooled for chunk in chunks)
        # Prompts' own logprobs need further logits than those of rows.
        needed = step_size(len(packed.positions)) if plain else row_limit
        more = [packed.new, padded_positions(packed, needed)]
        step_with = partial(
            paged_step,
            *(rows, new, 0, COMPILED_TOKENS, counts, tail, row_limit),
            division=self._division,
            upload=self._upload,
        )
        with (
            fed_step(step_with, tokens, more) as (step, fed, positions),
            self.routing.route(runs),
            self._given([TokenInputs(len(tokens)), *given, TokenInputs(tail)]),
        ):
            adapted = self.routing.call is not None
            if plain or (adapted and chunks):
                return self._packed_outcome(
                    *(fed, positions, packed, chunks, step.layers(), step_size)
                )
            steps = self._adapted_chunk_steps if adapted else self._chunk_steps
            logits = steps(step, fed, positions, self._take_built())
        self._keep_form(steps, step, tokens, positions)
        return _outcome(logits[: step_size(packed.sampled)], packed, step)

    def _logits(self, tokens: mx.array, layers: Seq[Any], positions: mx.array | None) -> mx.array:
        """See ``ModelCall``."""
        if positions is not None:
            return self._logits_at(tokens, layers, positions)[0]
        logits: mx.array = self._model(tokens, cache=layers)
        return logits[:, -1]


def _outcome(logits: mx.array, packed: PackedTokens, step: PagedStep) -> ForwardOutput:
    """The outcome of a step; if none of its logits are sampled, they are evaluated all the same."""
    if packed.sampled:
        return ForwardOutput(logits, {}, {})
    step.memory.effects.append(logits)
    return ForwardOutput(None, {}, {})
