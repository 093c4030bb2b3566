"""The model calls of a step: the batch's rows and the chunks of prompts, in one where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import padded
from chairlift.cache.packed import BatchStep, packed
from chairlift.engine.model.compiled import CompiledSteps
from chairlift.engine.model.head import Head
from chairlift.engine.model.trial import Trial, within_largest

log = logging.getLogger(__name__)

# Of the largest logit: bfloat16 has two digits, and logits of wrong tokens differ by much more.
TOLERANCE = 0.05
_TRIAL = Trial(within_largest(TOLERANCE), log, error="a model call of another form fails: %s")


class Chunk(NamedTuple):
    """The next tokens of a prompt, whose cache has one row. So many ``choices`` begin with them: 0
    if the prompt does not end here. Of the first ``scored`` the logits are wanted as well, and the
    hidden states of all if it is ``pooled``.
    """

    cache: BatchCache
    tokens: Seq[int]
    choices: int
    scored: int = 0
    pooled: bool = False


class Outcome(NamedTuple):
    """``logits`` are ``[rows + choices, vocabulary]``, None if there are none.

    By chunk, ``scored`` are ``[scored, vocabulary]``, where any are wanted, and ``hidden``
    ``[tokens, hidden size]``, of pooled chunks: what the output layer is given.
    """

    logits: mx.array | None
    scored: dict[int, mx.array]
    hidden: dict[int, mx.array]


class Forward:
    """Calls a model; builds graphs only, unless the model is eager.

    Args:
        head: computes logits for the positions wanted only; None where the model's has not been
            found.
        packs: one call does for rows and chunks together; see ``cache.packed``.
        multiple: the last chunk of a prompt is padded to a multiple of so many tokens, where it is
            packed: so its shape is not new.
    """

    def __init__(self, model: Any, head: Head | None, packs: bool, multiple: int = 1) -> None:
        self._model = model
        self._rows = CompiledSteps(model)
        self._head = head
        self.packs = packs
        self._multiple = multiple

    @property
    def selects_positions(self) -> bool:
        """Whether logits are computed where they are wanted only."""
        return self._head is not None

    def __call__(self, bands: Seq[BatchCache], tokens: mx.array, chunks: Seq[Chunk]) -> Outcome:
        """
        Args:
            tokens: ``[rows]``, the next of each row of ``bands``, one band after the other.
        """
        bands = [band for band in bands if len(band)]
        if self.packs and (chunks or len(bands) > 1):
            return self._together(bands, tokens, chunks)
        logits = []
        scored: dict[int, mx.array] = {}
        hidden: dict[int, mx.array] = {}
        start = 0
        for band in bands:
            own, start = tokens[start : start + len(band), None], start + len(band)
            with band.step(1):
                logits.append(self._rows(band, own)[:, -1])
        for number, chunk in enumerate(chunks):
            new = mx.array([chunk.tokens], mx.int32)
            where = [*range(chunk.scored), len(chunk.tokens) - 1]
            with chunk.cache.step(len(chunk.tokens)), self._only(where, axis=1) as seen:
                own = self._model(new, cache=chunk.cache.layers)
            own = own[0] if seen else own[0, mx.array(where)]
            logits += [own[-1:]] * chunk.choices
            if chunk.scored:
                scored[number] = own[:-1]
            if chunk.pooled:
                hidden[number] = seen[0][0]
        return Outcome(mx.concatenate(logits) if logits else None, scored, hidden)

    def _together(self, bands: Seq[BatchCache], tokens: mx.array, chunks: Seq[Chunk]) -> Outcome:
        new: list[int] = []
        steps = [BatchStep(band, 1, 1) for band in bands]
        rows = tokens.shape[0]
        wanted = list(range(rows))
        places: list[slice] = []
        for chunk in chunks:
            real = len(chunk.tokens)
            step = self._padded(chunk)
            places.append(slice(rows + len(new), rows + len(new) + real))
            wanted += [places[-1].stop - 1] * chunk.choices
            new += [*chunk.tokens, *[0] * (step - real)]
            steps.append(BatchStep(chunk.cache, step, real))
        where, parts = list(wanted), {}
        for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
            if chunk.scored:
                parts[number] = slice(len(where), len(where) + chunk.scored)
                where += range(place.start, place.start + chunk.scored)
        every = mx.concatenate([tokens, mx.array(new, mx.int32)])[:, None]
        with packed(steps) as layers, self._only(where, axis=0) as seen:
            logits = self._model(every, cache=layers)
        logits = logits[:, -1] if seen else logits[mx.array(where, mx.int32), -1]
        return Outcome(
            logits[: len(wanted)] if wanted else None,
            {number: logits[part] for number, part in parts.items()},
            {n: seen[0][place, 0] for n, place in enumerate(places) if chunks[n].pooled},
        )

    def _padded(self, chunk: Chunk) -> int:
        """Tokens that a chunk is computed with: the last one of a prompt is padded, unless its
        cache would have to grow for that.
        """
        real, cache = len(chunk.tokens), chunk.cache
        step = padded(real, self._multiple) if chunk.choices else real
        return step if cache.offsets[0] + step <= cache.capacity.columns else real

    def _only(self, where: list[int], axis: int) -> AbstractContextManager[list[mx.array]]:
        """While inside, logits are computed there only; yields what the output layer was given:
        nothing where it is not known.
        """
        return self._head.only(where, axis) if self._head else nullcontext([])


class CacheFactories(NamedTuple):
    """What makes the caches of rows, and those of prompts."""

    rows: Callable[[], BatchCache]
    prompts: Callable[[], BatchCache]


class SelectedForward(NamedTuple):
    """How to call a model, and with which caches."""

    forward: Forward
    makers: CacheFactories


def select_forward(
    model: Any,
    make_cache: Callable[[], BatchCache],
    wanted: CacheFactories,
    multiple: int = 1,
) -> SelectedForward:
    """The way to call a model that does least, of those that give the logits of plain calls.

    Args:
        make_cache: makes those of the plain calls.
        wanted: make the caches that there should be, if they give these logits too.
    """
    plain = Forward(model, None, packs=False)
    both = CacheFactories(make_cache, make_cache)
    expected = _trial_logits(plain, both)
    head = Head(model)
    forms = [(head, True), (None, True), (head, False), (None, False)]
    # Caches of rows that are like any other are tried once.
    choices = (wanted, both) if wanted.rows().queued else (both,)
    for (ours, packs), makers in product(forms, choices):
        if packs and not make_cache().pads:
            continue  # a state goes from token to token
        forward = Forward(model, ours, packs, multiple)
        if _TRIAL.passes(lambda: expected, partial(_trial_logits, forward, makers)):
            return _log_choice(SelectedForward(forward, makers))
    return _log_choice(SelectedForward(plain, both))


def _log_choice(fit: SelectedForward) -> SelectedForward:
    calls = "one for rows and prompts" if fit.forward.packs else "one for the rows and each prompt"
    logits = "where they are wanted" if fit.forward.selects_positions else "for every token"
    steps = (
        "launched while the one before runs" if fit.makers.rows().queued else "one after the other"
    )
    log.info("model calls of a step: %s; logits: %s; steps: %s", calls, logits, steps)
    return fit


def _trial_logits(forward: Forward, makers: CacheFactories) -> mx.array:
    """The logits of two prompts that end in one step, and of their rows beside a third prompt, in
    two bands. One of the prompts comes in two chunks.
    """
    bands = one, two = makers.rows(), makers.rows()
    prompts = [makers.prompts() for _ in range(3)]
    for prompt in prompts:
        prompt.join(columns=4)
    nobody = mx.zeros((0,), mx.int32)
    forward(bands, nobody, [Chunk(prompts[1], [4, 2], 0)])
    mx.eval([prompt.state for prompt in prompts])
    first = forward(bands, nobody, [Chunk(prompts[0], [1, 5, 2], 2), Chunk(prompts[1], [3], 1)])
    mx.eval(first.logits, *(prompt.state for prompt in prompts))
    for band, prompt in ((one, prompts[0]), (two, prompts[1]), (two, prompts[0])):
        band.join(prompt.extract(0))
    mx.eval([(band.take_moves(), band.state) for band in bands])
    tokens = mx.array([6, 7, 6], mx.int32)
    second = forward(bands, tokens, [Chunk(prompts[2], [2, 6, 1, 3], 1)])
    assert first.logits is not None
    assert second.logits is not None
    return mx.concatenate([first.logits, second.logits]).astype(mx.float32)


def hidden_size(forward: Forward, make_cache: Callable[[], BatchCache]) -> int | None:
    """How many numbers a model's last hidden states have; None where these cannot be had."""
    prompt = make_cache()
    prompt.join(columns=4)
    chunk = Chunk(prompt, [1, 5, 2], 1, pooled=True)
    try:
        hidden = forward([], mx.zeros((0,), mx.int32), [chunk]).hidden[0]
        mx.eval(hidden)
    except Exception as error:  # a model's own code, which may raise anything
        log.debug("a model's hidden states are not where they are looked for: %s", error)
        return None
    return hidden.shape[1] if hidden.ndim == 2 and hidden.shape[0] == len(chunk.tokens) else None
