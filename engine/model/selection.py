"""Finds the fastest way to call a model that gives the same logits as plain calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import Cache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.step_parts import PagedAttention
from chairlift.cache.snapshot import StatePiece
from chairlift.engine.model import split
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.head import Head
from chairlift.engine.model.lora_routing import Slot
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.expert_choices import ExpertChoices
from chairlift.engine.model.trials.trial import Trial, within_rms
from chairlift.engine.model.vision.model import VisionModel

log = logging.getLogger(__name__)

# As a share of a row's logits. In bfloat16, attention that rounds at other places changes the
# logits of 34 random layers by up to 0.08, and the model's own code is as far from exact logits;
# one token that is not seen changes them by 0.2 or more.
TOLERANCE = 0.15
# In float32: the logits of mlx-lm's 122 model files change by up to 3e-6, and by 2e-4 with keys and
# values in float16. GPUs may multiply float32 numbers with 10 bits of their fractions.
FLOAT32_TOLERANCE = 0.02
# Pages of each kind during a trial, which has six short sequences.
TRIAL_PAGES = 16

PageCounts = Mapping[int | None, int]
MakePages = Callable[[PageCounts], PagedMemory]


@dataclass(frozen=True, slots=True)
class SelectedForward:
    """The chosen way to call a model, with the caches for it.

    Attributes:
        forward: calls the model.
        make_cache: makes an empty cache of columns.
        make_pages: makes the memory of paged caches, with a number of pages of each kind; None if
            the caches are columns.
    """

    forward: Forward
    make_cache: Callable[[], BatchCache]
    make_pages: MakePages | None = None

    def trial_logits(self, adapter: Slot = None) -> mx.array:
        """See ``trial_logits``."""
        return trial_logits(self.forward, self.trial_caches(), adapter)

    def trial_caches(self) -> Callable[[], Cache]:
        """A function that makes empty caches, which are large enough for a trial."""
        if self.make_pages is None:
            return self.make_cache
        windows = [kind.window for kind in self.make_cache().kinds if not kind.recurrent]
        return partial(PagedBatch, self.make_pages(dict.fromkeys(windows, TRIAL_PAGES)))


def select_forward(
    model: Any,
    make_cache: Callable[[], BatchCache],
    make_pages: MakePages | None = None,
    multiple: int = 1,
    max_pairs: int | None = None,
    chained: bool = False,
    quantized: bool = False,
) -> SelectedForward:
    """Finds the fastest way to call a model that gives the same logits as plain calls.

    Args:
        make_cache: makes the caches of plain calls.
        make_pages: makes the device's pages, which are used if they give the same logits, too.
        multiple, max_pairs, chained: see ``Forward``.
        quantized: whether keys and values are quantized. Then a difference in the last bit of a
            number can change its code.
    """
    tolerance = TOLERANCE if quantized else _tolerance(model)
    trial = Trial(within_rms(tolerance), log, error="a model call of another form fails: %s")
    # Layers of models with images are not split: the inputs that images add to a step, such as
    # masks, depend on the layout of the whole step.
    may_split = not isinstance(model, VisionModel)
    if may_split:
        split.install(model)
    plain = Forward(model, None, packs=False, max_pairs=max_pairs, chained=chained)
    experts = ExpertChoices()
    expected = experts.record(lambda: trial_logits(plain, make_cache))
    head = Head(model)

    def choices() -> Iterator[SelectedForward]:
        if make_pages is not None:
            for attention in PagedAttention:
                may_read = may_split or attention is PagedAttention.KERNEL
                for head_or_none in (head, None) if may_read else ():
                    forward = PagedForward(model, head_or_none, max_pairs, attention)
                    yield SelectedForward(forward, make_cache, make_pages)
        for packs, splits in ((True, False), (True, True), (False, False)):
            for head_or_none in (head, None) if not splits or may_split else ():
                more = multiple, max_pairs, chained, splits
                yield SelectedForward(Forward(model, head_or_none, packs, *more), make_cache)

    for choice in choices():
        if trial.passes(lambda: expected, partial(experts.repeat, choice.trial_logits)):
            if isinstance(choice.forward, PagedForward) and not make_cache().pads:
                choice.forward.pads = _pads(choice, tolerance / 2)
            return _logged(choice)
    return _logged(SelectedForward(plain, make_cache))


def _tolerance(model: Any) -> float:
    """The share of a row's logits by which they may differ; see ``TOLERANCE``."""
    parameters: Any = tree_flatten(model.parameters())
    types = {array.dtype for _, array in parameters if mx.issubdtype(array.dtype, mx.floating)}
    return FLOAT32_TOLERANCE if types == {mx.float32} else TOLERANCE


def _pads(choice: SelectedForward, tolerance: float) -> bool:
    """Whether the recurrent layers of a model over pages regard the lengths of padded rows.

    If they do not, prompts of different lengths have states that are far from those alone.
    """
    forward, make_cache = choice.forward, choice.trial_caches()
    assert isinstance(forward, PagedForward)
    experts = ExpertChoices()

    def states(pads: bool) -> mx.array:
        forward.pads = pads
        prompts = [make_cache() for _ in range(2)]
        for prompt in prompts:
            prompt.join()
        tokens = [1, 5, 2, 7, 3, 6, 4, 1, 2], [3, 6]
        chunks = [Chunk(prompt, own, 0) for prompt, own in zip(prompts, tokens, strict=True)]
        forward([], mx.zeros((0,), mx.int32), chunks)
        layers = [piece for prompt in prompts for piece in prompt.extract(0).layers]
        pieces = [piece for piece in layers if isinstance(piece, StatePiece)]
        arrays = [array for piece in pieces for array in piece.arrays]
        flat = [array.reshape(-1).astype(mx.float32) for array in arrays]
        widest = max(array.size for array in flat)
        return mx.stack([mx.pad(array, [(0, widest - array.size)]) for array in flat])

    expected = experts.record(lambda: states(False))
    trial = Trial(within_rms(tolerance), log, error="padded recurrent layers fail: %s")
    return trial.passes(lambda: expected, partial(experts.repeat, lambda: states(True)))


def _logged(choice: SelectedForward) -> SelectedForward:
    calls = (
        "one for rows and prompts" if choice.forward.packs else "one for the rows and each prompt"
    )
    logits = "only where they are needed" if choice.forward.selects_positions else "for every token"
    caches = "columns" if choice.make_pages is None else "pages"
    log.info("model calls of a step: %s; logits: %s; KV caches: %s", calls, logits, caches)
    return choice


def trial_logits(
    forward: Forward, make_cache: Callable[[], Cache], adapter: Slot = None
) -> mx.array:
    """The logits of a short run of two steps, in which all tokens have this adapter.

    Two prompts, one of them in two chunks, end in the first step. In the second step they decode in
    two bands, beside a third prompt.
    """
    bands = one, two = make_cache(), make_cache()
    prompts = [make_cache() for _ in range(3)]
    for prompt in prompts:
        prompt.join()

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
    return mx.concatenate([first.logits[:3], second.logits[:4]]).astype(mx.float32)


def hidden_size(choice: SelectedForward) -> int | None:
    """The length of a model's last hidden states; None if they cannot be read."""
    forward, prompt = choice.forward, choice.trial_caches()()
    prompt.join()
    chunk = Chunk(prompt, [1, 5, 2], 1, pooled=True)
    try:
        hidden = forward([], mx.zeros((0,), mx.int32), [chunk]).hidden[0]
        mx.eval(hidden)
    except Exception as error:  # a model file may raise anything
        log.debug("a model's hidden states cannot be read: %s", error)
        return None
    return hidden.shape[1] if hidden.ndim == 2 and hidden.shape[0] == len(chunk.tokens) else None
