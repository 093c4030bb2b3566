"""The model calls of a step: decode rows and prompt chunks, in one call where possible."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import padded
from chairlift.cache.kinds import Cache
from chairlift.cache.packed.step import BatchStep, packed
from chairlift.engine.model.chunk import Chunk, PackedTokens, packed_tokens
from chairlift.engine.model.drafted import DraftedBand, row_runs
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import AdapterRun, Routing, Slot
from chairlift.engine.model.vision.token_inputs import TokenInputs, given_of, row_inputs


class ForwardOutput(NamedTuple):
    """The results of a step's model calls.

    Attributes:
        logits: ``[rows' tokens + choices, vocabulary]``, perhaps with unused lines behind them;
            None if there are no rows and no choices.
        scored: the logits ``[scored, vocabulary]`` of chunks with ``scored``, by chunk number.
        hidden: the inputs ``[tokens, hidden size]`` of the output layer, of pooled chunks, by chunk
            number.
    """

    logits: mx.array | None
    scored: dict[int, mx.array]
    hidden: dict[int, mx.array]


class Forward:
    """Calls a model; builds graphs only, unless the model is eager.

    Args:
        head: computes logits at selected positions only; None if the model's output layer was not
            found.
        packs: one call computes rows and chunks together; see ``cache.packed``.
        multiple: in packed calls, the last chunk of a prompt is padded to a multiple of this many
            tokens, to have few different shapes.
        max_pairs: pairs of a query and a key that a model call of one chunk may have, because a
            model file with attention of its own keeps a score of each pair and head. Longer chunks
            take several calls. Packed calls need no bound, unless they split: they use the engine's
            attention.
        chained: each model call of a step waits for the call before. Ranks that compute a model
            together need the same order of all calls, and MLX may choose any.

    Attributes:
        routing: the adapters of the tokens of each model call.
        wait_dispatched: called before something is evaluated while a graph is built; see
            ``device.dispatch.Dispatcher``. Settable.
    """

    def __init__(
        self,
        model: Any,
        head: Head | None,
        packs: bool,
        multiple: int = 1,
        max_pairs: int | None = None,
        chained: bool = False,
        splits: bool = False,
    ) -> None:
        self._model = model
        self.routing = Routing()
        self.wait_dispatched: Callable[[], None] = lambda: None
        self._head = head
        self.packs = packs
        self.splits = splits
        self._multiple = multiple
        self._max_pairs = max_pairs
        self._chained = chained
        self._given = given_of(model)

    @property
    def selects_positions(self) -> bool:
        """Whether logits are computed at the needed positions only."""
        return self._head is not None

    def __call__(
        self,
        bands: Seq[Cache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot] = (),
        drafted: Seq[DraftedBand] = (),
        shifts: Seq[int] = (),
    ) -> ForwardOutput:
        """Computes the next logits of all rows and chunks.

        Args:
            bands: the caches of decode rows. Empty ones are ignored.
            tokens: ``[tokens]``, the next token of each row, one band after the other; with
                ``drafted``, the tokens of its rows.
            chunks: the next tokens of prompts.
            adapters: the slot of each row's adapter; empty if no row has one.
            drafted: the rows of each band that is not empty, if any of them has a draft.
            shifts: what images add to each row's position; empty if nothing.
        """
        bands = cast("list[BatchCache]", [band for band in bands if len(band)])
        packs = self.packs and not any(chunk.sees_ahead for chunk in chunks)
        # Rows with drafts of different lengths would bring padding.
        packs &= not drafted or all(band.pads for band in bands)
        if self.splits:
            packs &= all(self._call_tokens(chunk) == len(chunk.tokens) for chunk in chunks)
        if packs and (chunks or drafted or len(bands) > 1):
            return self._packed_call(bands, tokens, chunks, adapters, drafted, shifts)
        logits = []
        scored: dict[int, mx.array] = {}
        hidden: dict[int, mx.array] = {}
        start = 0
        last: mx.array | None = None
        for drafting in drafted:
            rows = slice(start, start + len(drafting.rows))
            start = rows.stop
            length = max(drafting.counts)
            drafting.shifts = shifts[rows]
            with self._given([TokenInputs(length, shift) for shift in drafting.shifts]):
                logits.append(drafting.call(self._model, self.routing, partial(self._after, last)))
            last = logits[-1]
        for band in () if drafted else bands:
            rows = slice(start, start + len(band))
            fed, start = tokens[rows, None], rows.stop
            with (
                band.step(1),
                self.routing.route([AdapterRun(slot, 1) for slot in adapters[rows]]),
                self._given([TokenInputs(1, shift) for shift in shifts[rows]]),
            ):
                logits.append(self._model(self._after(last, fed), cache=band.layers)[:, -1])
            last = logits[-1]
        for number, chunk in enumerate(chunks):
            result, inputs = self._chunk_call(chunk, last)
            last = result
            logits += [result[-1:]] * chunk.choices
            if chunk.scored:
                scored[number] = result[:-1]
            if chunk.pooled:
                hidden[number] = mx.concatenate(inputs)
        return ForwardOutput(mx.concatenate(logits) if logits else None, scored, hidden)

    def build_ahead(self) -> None:
        """Builds the next step in advance, if it is likely to have the last one's shape.

        Call it while the device computes a step with drafts: what follows waits for the host.
        """

    def commit(self, drafted: DraftedBand, kept: Seq[int]) -> None:
        """Keeps the first ``kept[r]`` tokens of each row of a band in the step before."""
        drafted.commit(kept, self._model, self.routing, self._given)

    def _after(self, last: mx.array | None, tokens: mx.array) -> mx.array:
        """The tokens of a model call that comes after the call with the logits ``last``."""
        if last is None or not self._chained:
            return tokens
        return cast(mx.array, mx.depends(tokens, last))

    def _chunk_call(self, chunk: Chunk, last: mx.array | None) -> tuple[mx.array, list[mx.array]]:
        """Calls the model with the tokens of one chunk, at once or part by part.

        Args:
            last: the logits of the model call before.

        Returns:
            Logits ``[scored + 1, vocabulary]``, those of the last token at the end; and for each
            call of a pooled chunk the input of the output layer, ``[tokens, hidden size]``.
        """
        results: list[mx.array] = []
        inputs: list[mx.array] = []
        cache = cast(BatchCache, chunk.cache)
        count = len(chunk.tokens)
        size = self._call_tokens(chunk)
        for start in range(0, count, size):
            part = chunk.tokens[start : start + size]
            numbers = [*range(max(0, min(len(part), chunk.scored - start)))]
            is_last = start + size >= count
            if is_last or not numbers:
                numbers.append(len(part) - 1)
            positions = mx.array(numbers, mx.int32)
            with (
                self._given([chunk.inputs(len(part), len(part))]),
                cache.step(len(part)),
                self._select(positions, axis=1) as seen,
                self.routing.route([AdapterRun(chunk.adapter, len(part))]),
            ):
                tokens = self._after(last, mx.array([part], mx.int32))
                last = result = self._model(tokens, cache=cache.layers)
            result = result[0] if seen else result[0, positions]
            if is_last or chunk.scored > start:
                results.append(result)
            if chunk.pooled:
                inputs.append(seen[0][0])
            if not is_last:
                # The scores of this call are freed before those of the next are allocated.
                mx.eval(cache.state, results, inputs)
        return mx.concatenate(results), inputs

    def _call_tokens(self, chunk: Chunk) -> int:
        """How many tokens of a chunk one model call computes."""
        count = len(chunk.tokens)
        if self._max_pairs is None or chunk.sees_ahead:
            return count
        return min(count, max(1, self._max_pairs // (chunk.cache.offsets[0] + count)))

    def _packed_call(
        self,
        bands: Seq[BatchCache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot],
        drafted: Seq[DraftedBand],
        shifts: Seq[int],
    ) -> ForwardOutput:
        lengths = [self._padded(chunk) for chunk in chunks]
        tokens_of = packed_tokens(tokens.shape[0], chunks, lengths)
        runs = row_runs(tokens.shape[0], adapters, drafted)
        runs += [
            AdapterRun(chunk.adapter, step) for chunk, step in zip(chunks, lengths, strict=True)
        ]
        steps = []
        for number, band in enumerate(bands):
            counts = drafted[number].counts if drafted else [1] * len(band)
            begin = drafted[number].transaction.step if drafted else band.step
            steps.append(BatchStep(band, counts, counts, begin))
        for chunk, step in zip(chunks, lengths, strict=True):
            cache = cast(BatchCache, chunk.cache)
            steps.append(BatchStep(cache, [step], [len(chunk.tokens)], cache.step))
        counts = [count for band in drafted for count in band.counts] or [1] * tokens.shape[0]
        inputs = row_inputs(counts, shifts)
        inputs += [c.inputs(len(c.tokens), step) for c, step in zip(chunks, lengths, strict=True)]
        with (
            packed(steps, self.splits, self.routing.within) as layers,
            self.routing.route(runs),
            self._given(inputs),
        ):
            fed = mx.concatenate([tokens, mx.array(tokens_of.new, mx.int32)])[:, None]
            positions = mx.array(tokens_of.positions, mx.int32)
            return self._packed_outcome(fed, positions, tokens_of, chunks, layers)

    def _packed_outcome(
        self,
        tokens: mx.array,
        positions: mx.array,
        packed: PackedTokens,
        chunks: Seq[Chunk],
        layers: Seq[Any],
        size: Callable[[int], int] = int,
    ) -> ForwardOutput:
        """Calls the model with the tokens of rows and chunks, ``[tokens, 1]``.

        Args:
            positions: those of ``packed``, and perhaps more behind them.
            size: maps the number of sampled tokens to the number of lines of logits to return.
        """
        logits, inputs = self._logits_at(tokens, layers, positions)
        return ForwardOutput(
            logits[: size(packed.sampled)] if packed.sampled else None,
            {number: logits[part] for number, part in packed.scored.items()},
            {n: inputs[0][place, 0] for n, place in enumerate(packed.places) if chunks[n].pooled},
        )

    def _logits_at(
        self, tokens: mx.array, layers: Seq[Any], positions: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        """Calls the model with tokens ``[tokens, 1]``, of which some need logits.

        Returns:
            Logits ``[positions, vocabulary]``, and the complete inputs of the output layer.
        """
        with self._select(positions, axis=0) as inputs:
            logits = self._model(tokens, cache=layers)
        return logits[:, -1] if inputs else logits[positions, -1], inputs

    def _padded(self, chunk: Chunk) -> int:
        """The padded length of a chunk.

        Only a prompt's last chunk is padded, and only if its cache does not have to grow for that.
        """
        real, cache = len(chunk.tokens), cast(BatchCache, chunk.cache)
        step = padded(real, self._multiple) if chunk.choices and cache.pads else real
        return step if cache.offsets[0] + step <= cache.capacity.columns else real

    def _select(self, positions: mx.array, axis: int) -> AbstractContextManager[list[mx.array]]:
        """A context in which logits are computed at these positions only.

        Yields the list of the output layer's inputs, which stays empty if that layer is unknown.
        """
        return self._head.select(positions, axis) if self._head else nullcontext([])
