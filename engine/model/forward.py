"""The model calls of a step: decode rows and prompt chunks, in one call where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import padded
from chairlift.cache.packed import BatchStep, packed
from chairlift.engine.model.compiled import CompiledSteps
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import Routing, Run, Slot
from chairlift.engine.model.trial import Trial, within_largest

log = logging.getLogger(__name__)

# As a share of the largest logit. bfloat16 has two digits; wrong logits differ by much more.
TOLERANCE = 0.05
_TRIAL = Trial(within_largest(TOLERANCE), log, error="a model call of another form fails: %s")


class Chunk(NamedTuple):
    """The next tokens of one prompt.

    Attributes:
        cache: the prompt's cache, of one row.
        choices: the number of sequences that continue this prompt; 0 if the prompt does not end
            with this chunk.
        scored: the logits of this many first tokens are needed as well, for prompt logprobs.
        pooled: the hidden states of all tokens are needed.
        adapter: the slot of its adapter.
    """

    cache: BatchCache
    tokens: Seq[int]
    choices: int
    scored: int = 0
    pooled: bool = False
    adapter: Slot = None


class Outcome(NamedTuple):
    """The results of a step's model calls.

    Attributes:
        logits: ``[rows + choices, vocabulary]``; None if there are no rows and no choices.
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
            take several calls. Packed calls need no bound: they use the engine's attention.
        chained: each model call of a step waits for the call before. Ranks that compute a model
            together need the same order of all calls, and MLX may choose any.

    Attributes:
        routing: the adapters of the tokens of each model call.
    """

    def __init__(
        self,
        model: Any,
        head: Head | None,
        packs: bool,
        multiple: int = 1,
        max_pairs: int | None = None,
        chained: bool = False,
    ) -> None:
        self._model = model
        self.routing = Routing()
        self._rows = CompiledSteps(model)
        self._adapted_rows = CompiledSteps(model, self.routing)
        self._head = head
        self.packs = packs
        self._multiple = multiple
        self._max_pairs = max_pairs
        self._chained = chained

    @property
    def selects_positions(self) -> bool:
        """Whether logits are computed at the needed positions only."""
        return self._head is not None

    def __call__(
        self, bands: Seq[BatchCache], tokens: mx.array, chunks: Seq[Chunk], adapters: Seq[Slot] = ()
    ) -> Outcome:
        """Computes the next logits of all rows and chunks.

        Args:
            bands: the caches of decode rows. Empty ones are ignored.
            tokens: ``[rows]``, the next token of each row, one band after the other.
            chunks: the next tokens of prompts.
            adapters: the slot of each row's adapter; empty if no row has one.
        """
        bands = [band for band in bands if len(band)]
        if self.packs and (chunks or len(bands) > 1):
            return self._packed_call(bands, tokens, chunks, adapters)
        logits = []
        scored: dict[int, mx.array] = {}
        hidden: dict[int, mx.array] = {}
        start = 0
        last: mx.array | None = None
        for band in bands:
            rows = slice(start, start + len(band))
            fed, start = tokens[rows, None], rows.stop
            with band.step(1), self.routing.of([Run(slot, 1) for slot in adapters[rows]]):
                steps = self._rows if self.routing.call is None else self._adapted_rows
                logits.append(steps(band, self._after(last, fed))[:, -1])
            last = logits[-1]
        for number, chunk in enumerate(chunks):
            result, inputs = self._chunk_call(chunk, last)
            last = result
            logits += [result[-1:]] * chunk.choices
            if chunk.scored:
                scored[number] = result[:-1]
            if chunk.pooled:
                hidden[number] = mx.concatenate(inputs)
        return Outcome(mx.concatenate(logits) if logits else None, scored, hidden)

    def _after(self, last: mx.array | None, tokens: mx.array) -> mx.array:
        """The tokens of a model call that comes after the call with the logits ``last``."""
        if last is None or not self._chained:
            return tokens
        after: Any = mx.depends(tokens, last)
        return cast(mx.array, after)

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
        count = len(chunk.tokens)
        size = self._call_tokens(chunk)
        for start in range(0, count, size):
            part = chunk.tokens[start : start + size]
            positions = [*range(max(0, min(len(part), chunk.scored - start)))]
            is_last = start + size >= count
            if is_last or not positions:
                positions.append(len(part) - 1)
            run = Run(chunk.adapter, len(part))
            with (
                chunk.cache.step(len(part)),
                self._select(positions, axis=1) as seen,
                self.routing.of([run]),
            ):
                tokens = self._after(last, mx.array([part], mx.int32))
                last = result = self._model(tokens, cache=chunk.cache.layers)
            result = result[0] if seen else result[0, mx.array(positions)]
            if is_last or chunk.scored > start:
                results.append(result)
            if chunk.pooled:
                inputs.append(seen[0][0])
            if not is_last:
                # The scores of this call are freed before those of the next are allocated.
                mx.eval(chunk.cache.state, results, inputs)
        return mx.concatenate(results), inputs

    def _call_tokens(self, chunk: Chunk) -> int:
        """How many tokens of a chunk one model call computes."""
        count = len(chunk.tokens)
        if self._max_pairs is None:
            return count
        return min(count, max(1, self._max_pairs // (chunk.cache.offsets[0] + count)))

    def _packed_call(
        self,
        bands: Seq[BatchCache],
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot],
    ) -> Outcome:
        new: list[int] = []
        runs = [Run(slot, 1) for slot in adapters] or [Run(None, tokens.shape[0])]
        steps = [BatchStep(band, 1, 1) for band in bands]
        rows = tokens.shape[0]
        sampled = list(range(rows))
        places: list[slice] = []
        for chunk in chunks:
            real = len(chunk.tokens)
            step = self._padded(chunk)
            places.append(slice(rows + len(new), rows + len(new) + real))
            sampled += [places[-1].stop - 1] * chunk.choices
            new += [*chunk.tokens, *[0] * (step - real)]
            steps.append(BatchStep(chunk.cache, step, real))
            runs.append(Run(chunk.adapter, step))
        positions, parts = list(sampled), {}
        for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
            if chunk.scored:
                parts[number] = slice(len(positions), len(positions) + chunk.scored)
                positions += range(place.start, place.start + chunk.scored)
        fed = mx.concatenate([tokens, mx.array(new, mx.int32)])[:, None]
        with (
            packed(steps) as layers,
            self._select(positions, axis=0) as inputs,
            self.routing.of(runs),
        ):
            logits = self._model(fed, cache=layers)
        logits = logits[:, -1] if inputs else logits[mx.array(positions, mx.int32), -1]
        return Outcome(
            logits[: len(sampled)] if sampled else None,
            {number: logits[part] for number, part in parts.items()},
            {n: inputs[0][place, 0] for n, place in enumerate(places) if chunks[n].pooled},
        )

    def _padded(self, chunk: Chunk) -> int:
        """The padded length of a chunk.

        Only a prompt's last chunk is padded, and only if its cache does not have to grow for that.
        """
        real, cache = len(chunk.tokens), chunk.cache
        step = padded(real, self._multiple) if chunk.choices else real
        return step if cache.offsets[0] + step <= cache.capacity.columns else real

    def _select(self, positions: list[int], axis: int) -> AbstractContextManager[list[mx.array]]:
        """A context in which logits are computed at these positions only.

        Yields the list of the output layer's inputs, which stays empty if that layer is unknown.
        """
        return self._head.select(positions, axis) if self._head else nullcontext([])


class CacheFactories(NamedTuple):
    """Two functions: one makes an empty cache for decode rows, one an empty cache for a prompt."""

    rows: Callable[[], BatchCache]
    prompts: Callable[[], BatchCache]


class SelectedForward(NamedTuple):
    """The chosen way to call a model, with the caches for it."""

    forward: Forward
    caches: CacheFactories


def select_forward(
    model: Any,
    make_cache: Callable[[], BatchCache],
    preferred: CacheFactories,
    multiple: int = 1,
    max_pairs: int | None = None,
    chained: bool = False,
) -> SelectedForward:
    """Finds the fastest way to call a model that gives the same logits as plain calls.

    Args:
        make_cache: makes the caches of plain calls.
        preferred: make the device's caches, which are used if they give the same logits, too.
        multiple, max_pairs, chained: see ``Forward``.
    """
    plain = Forward(model, None, packs=False, max_pairs=max_pairs, chained=chained)
    both = CacheFactories(make_cache, make_cache)
    expected = trial_logits(plain, both)
    head = Head(model)
    forms = [(head, True), (None, True), (head, False), (None, False)]
    choices = (preferred, both) if preferred.rows().queued else (both,)
    for (head_or_none, packs), caches in product(forms, choices):
        if packs and not make_cache().pads:
            continue  # a recurrent state has to see one token after the other
        forward = Forward(model, head_or_none, packs, multiple, max_pairs, chained)
        if _TRIAL.passes(lambda: expected, partial(trial_logits, forward, caches)):
            return _log_choice(SelectedForward(forward, caches))
    return _log_choice(SelectedForward(plain, both))


def _log_choice(fit: SelectedForward) -> SelectedForward:
    calls = "one for rows and prompts" if fit.forward.packs else "one for the rows and each prompt"
    logits = "where they are wanted" if fit.forward.selects_positions else "for every token"
    steps = (
        "launched while the one before runs" if fit.caches.rows().queued else "one after the other"
    )
    log.info("model calls of a step: %s; logits: %s; steps: %s", calls, logits, steps)
    return fit


def trial_logits(forward: Forward, caches: CacheFactories, adapter: Slot = None) -> mx.array:
    """The logits of a short run of two steps, in which all tokens have this adapter.

    Two prompts, one of them in two chunks, end in the first step. In the second step they decode in
    two bands, beside a third prompt.
    """
    bands = one, two = caches.rows(), caches.rows()
    prompts = [caches.prompts() for _ in range(3)]
    for prompt in prompts:
        prompt.join(columns=4)

    def chunk(prompt: int, tokens: list[int], choices: int) -> Chunk:
        return Chunk(prompts[prompt], tokens, choices, adapter=adapter)

    no_rows = mx.zeros((0,), mx.int32)
    forward(bands, no_rows, [chunk(1, [4, 2], 0)])
    mx.eval([prompt.state for prompt in prompts])
    first = forward(bands, no_rows, [chunk(0, [1, 5, 2], 2), chunk(1, [3], 1)])
    mx.eval(first.logits, *(prompt.state for prompt in prompts))
    for band, prompt in ((one, prompts[0]), (two, prompts[1]), (two, prompts[0])):
        band.join(prompt.extract(0))
    mx.eval([(band.take_moves(), band.state) for band in bands])
    tokens = mx.array([6, 7, 6], mx.int32)
    second = forward(bands, tokens, [chunk(2, [2, 6, 1, 3], 1)], [adapter] * 3)
    assert first.logits is not None
    assert second.logits is not None
    return mx.concatenate([first.logits, second.logits]).astype(mx.float32)


def hidden_size(forward: Forward, make_cache: Callable[[], BatchCache]) -> int | None:
    """The length of a model's last hidden states; None if they cannot be read."""
    prompt = make_cache()
    prompt.join(columns=4)
    chunk = Chunk(prompt, [1, 5, 2], 1, pooled=True)
    try:
        hidden = forward([], mx.zeros((0,), mx.int32), [chunk]).hidden[0]
        mx.eval(hidden)
    except Exception as error:  # a model file may raise anything
        log.debug("a model's hidden states cannot be read: %s", error)
        return None
    return hidden.shape[1] if hidden.ndim == 2 and hidden.shape[0] == len(chunk.tokens) else None
