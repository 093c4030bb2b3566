"""Prepares a loaded model: chooses how a step calls it, and with which caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from chairlift.cache.kinds import PLAIN, AttentionLayers, make_batch
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.lora.adapters import DEFAULT_LIMITS, AdapterLimits, Adapters
from chairlift.engine.model.attention import score_heads
from chairlift.engine.model.forward import (
    CacheFactories,
    Forward,
    hidden_size,
    select_forward,
    trial_logits,
)
from chairlift.engine.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The parts of a model that an engine core needs.

    Attributes:
        forward: builds the model calls of a step.
        caches: makes the caches of decode rows and of prompts.
        kinds: the kind of each layer's cache.
        vocabulary: the last dimension of the logits.
        hidden_size: the length of the last hidden states; None if they cannot be read.
        eager: the model computes while its graph is built; see ``engine.cpu.kernels``.
        adapters: the loaded LoRA adapters.
        agree: see ``parallel.ranks.Ranks.agree``.
    """

    forward: Forward
    caches: CacheFactories
    kinds: tuple[LayerKind, ...]
    vocabulary: int
    hidden_size: int | None
    eager: bool
    adapters: Adapters
    agree: Callable[[mx.array], mx.array] = lambda outcomes: outcomes


def prepare_model(
    model: Any,
    vocabulary: int,
    chunk_multiple: int = 1,
    eager: bool = False,
    quantization: Quantization | None = None,
    layers: AttentionLayers = PLAIN,
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
        quantization: the quantization of keys and values, in rows and prefixes; None for none.
        layers: the cache classes that are used if the model works with them; see
            ``engine.core.acceleration``.
        score_bytes: bounds the float32 attention scores of a layer, where a model file computes
            them by itself; None: no bound.
        ranks: those that compute the model together.
    """
    make_cache = partial(make_batch, model, quantization)
    preferred = CacheFactories(*(partial(make_cache, plain=layer) for layer in layers))
    heads = score_heads(model)
    max_pairs = score_bytes // (4 * heads) if score_bytes and heads else None
    forward, caches = select_forward(
        *(model, make_cache, preferred, chunk_multiple, max_pairs), chained=ranks.size > 1
    )
    return PreparedModel(
        forward=forward,
        caches=caches,
        kinds=tuple(make_cache().kinds),
        vocabulary=vocabulary,
        hidden_size=hidden_size(forward, make_cache),
        eager=eager,
        adapters=Adapters(
            *(model, forward.routing, partial(trial_logits, forward, caches), adapter_limits),
            on_host=eager,
        ),
        agree=ranks.agree,
    )
