"""Prepares a loaded model: chooses how a step calls it, and with which caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import Cache, make_batch, make_pages
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.kernels import PageKernels
from chairlift.cache.pages.memory import can_page
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.quantized import HalfPrecision, Quantization, Storage
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.lora.adapters import DEFAULT_LIMITS, AdapterLimits, Adapters
from chairlift.engine.model.attention import score_heads
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.selection import MakePages, hidden_size, select_forward
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.parallel.ranks import ALONE, Ranks
from chairlift.scheduler.limits import Limits


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The parts of a model that an engine core needs.

    Attributes:
        forward: builds the model calls of a step.
        make_cache: makes an empty cache of columns, for decode rows or for a prompt.
        make_pages: makes the memory of paged caches, see ``SelectedForward``; None if the caches
            are columns.
        kinds: the kind of each layer's cache.
        vocabulary: the last dimension of the logits.
        hidden_size: the length of the last hidden states; None if they cannot be read.
        eager: the model computes while its graph is built; see ``engine.cpu.kernels``.
        adapters: the loaded LoRA adapters.
        agree: see ``parallel.ranks.Ranks.agree``.
        vision: the model, if it is a vision model.
        max_context: of a draft model, the most tokens of a sequence; None: any.
    """

    forward: Forward
    make_cache: Callable[[], BatchCache]
    make_pages: MakePages | None
    kinds: tuple[LayerKind, ...]
    vocabulary: int
    hidden_size: int | None
    eager: bool
    adapters: Adapters
    agree: Callable[[mx.array], mx.array] = lambda outcomes: outcomes
    vision: VisionModel | None = None
    max_context: int | None = None

    def adapt_limits(self, limits: Limits) -> Limits:
        """The limits for this model's caches.

        Raises:
            ValueError: in pages, the memory is too small.
        """
        if self.make_pages is not None:
            # A step with a further prompt or a new chunk length costs no more launches.
            return replace(
                limits, paged=True, bands=1, chunk_multiple=1, avoid_partial_prefill=False
            )
        # If bands do not share the calls of all layers, each band's call reads weights again.
        shared = self.forward.packs and not self.forward.splits
        shared &= not any(kind.recurrent for kind in self.kinds)
        return limits if shared else replace(limits, bands=1)

    def caches(
        self, limits: Limits, prefix_bytes: int, reclaim: Callable[[], bool]
    ) -> Callable[[], Cache]:
        """A function that makes empty caches, for decode rows or for a prompt.

        Args:
            limits: the result of ``adapt_limits``.
            prefix_bytes: memory for the prefix cache. In pages it is part of the same pools.
            reclaim: drops a cached prefix; see ``PagePool``.
        """
        if self.make_pages is None:
            return self.make_cache
        assert limits.pages is not None
        prefix_pages = prefix_bytes // (PAGE_TOKENS * max(1, limits.geometry.bytes_per_token))
        budget = zip(limits.pages.pages, limits.pages.usable, strict=True)
        memory = self.make_pages({window: pages + prefix_pages for window, pages in budget})
        memory.on_shortage(reclaim)
        return partial(PagedBatch, memory)


def prepare_model(
    model: Any,
    vocabulary: int,
    chunk_multiple: int = 1,
    eager: bool = False,
    storage: Storage | None = None,
    kernels: PageKernels | None = None,
    score_bytes: int | None = None,
    ranks: Ranks = ALONE,
    adapter_limits: AdapterLimits = DEFAULT_LIMITS,
) -> PreparedModel:
    """Runs a few short trial steps to find the fastest way to call a model correctly.

    Args:
        model: an mlx-lm model whose caches can be batched; see ``probe``.
        vocabulary: the last dimension of its logits.
        chunk_multiple: the last chunk of a prompt is padded to a multiple of this many tokens.
        eager: see ``PreparedModel``.
        storage: how keys and values are stored, in rows and prefixes; None: in the model's type.
        kernels: read and write pages, if the device has such kernels. The caches are pages if all
            layers cache keys and values, and the model works with pages.
        score_bytes: bounds the float32 attention scores of a layer, where a model file computes
            them by itself; None: no bound.
        ranks: those that compute the model together.
    """
    make_cache = partial(make_batch, model, storage)
    kinds = tuple(make_cache().kinds)
    pages: MakePages | None = None
    # Over pages, a token's position is its place in the sequence, which not every model takes.
    placed = not isinstance(model, VisionModel) or model.is_placed
    if kernels is not None and can_page(kinds) and placed:
        assert not isinstance(storage, HalfPrecision), "pages have the model's type"
        pages = partial(make_pages, model, kernels, quantization=storage)
    heads = score_heads(model)
    max_pairs = score_bytes // (4 * heads) if score_bytes and heads else None
    vision = model if isinstance(model, VisionModel) else None
    language_model = model if vision is None else vision.model.language_model
    choice = select_forward(
        *(model, make_cache, pages, chunk_multiple, max_pairs),
        chained=ranks.size > 1,
        quantized=isinstance(storage, Quantization),
    )
    forward = choice.forward
    return PreparedModel(
        forward=forward,
        make_cache=make_cache,
        make_pages=choice.make_pages,
        kinds=kinds,
        vocabulary=vocabulary,
        hidden_size=hidden_size(choice),
        eager=eager,
        adapters=Adapters(
            *(language_model, forward.routing, choice.trial_logits, adapter_limits),
            on_host=eager,
        ),
        agree=ranks.agree,
        vision=vision,
    )
