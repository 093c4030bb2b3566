"""Tries the kernel of latent attention against MLX's own operations, before a model uses it."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.engine.cuda.paged.arrays import TokenStep
from chairlift.engine.cuda.paged.latent_attention import MANY_HEADS, latent_attention
from chairlift.engine.cuda.paged.selftest import ATTENTION_TRIAL

_LATENT, _ROTARY, _SCALE = 256, 64, 0.08
# Old and new tokens of each sequence. The longest has so many columns that several blocks compute
# them, if there are few tokens.
_SEQUENCES = ((37, 1), (0, 9), (62, 5), (900, 1))


@functools.cache
def latents_right() -> bool:
    """Whether the kernel compiles here and computes the same as MLX's own operations."""
    return all(_right(heads) for heads in (MANY_HEADS - 12, MANY_HEADS + 3))


def _right(heads: int) -> bool:
    places = [
        (row, old, position)
        for row, (old, new) in enumerate(_SEQUENCES)
        for position in range(old, old + new)
    ]
    owners, begins, positions = (mx.array(own, mx.int32) for own in zip(*places, strict=True))
    width = -(-max(map(sum, _SEQUENCES)) // PAGE_TOKENS)
    tables = 1 + mx.arange(len(_SEQUENCES) * width)[::-1].reshape(-1, width)
    lists = PageLists(
        width * np.arange(len(_SEQUENCES), dtype=np.int32), np.array(tables, np.int32).ravel()
    )
    pages = mx.array(page_table(lists, len(_SEQUENCES)))
    pool = KeysValues(
        *(_random(1 + tables.size, 1, PAGE_TOKENS, dim) for dim in (_LATENT, _ROTARY))
    )
    slots = tables[owners, positions // PAGE_TOKENS], slice(None), positions % PAGE_TOKENS
    new = KeysValues(*(buffer[slots][:, :, None] for buffer in pool))
    mx.eval(new)
    for buffer in pool:
        buffer[slots] = float("nan")
    queries, rotary = (_random(len(places), heads, 1, dim) for dim in (_LATENT, _ROTARY))
    mx.eval(pool, new, queries, rotary)
    step = TokenStep(pages, owners, begins, positions + 1, positions + 1)

    def ours() -> mx.array:
        limit = width * PAGE_TOKENS
        result = latent_attention(queries, rotary, new, pool, step, limit, _SCALE)
        mx.eval(result)
        return result

    def mlx() -> mx.array:
        latents, keys = (
            buffer[tables].swapaxes(1, 2).flatten(2, 3)[owners].astype(mx.float32)
            for buffer in pool
        )
        scores = _SCALE * (queries @ latents.swapaxes(2, 3)) + rotary @ keys.swapaxes(2, 3)
        seen = mx.arange(latents.shape[2]) <= positions[:, None]
        weights = mx.softmax(mx.where(seen[:, None, None], scores, -mx.inf), axis=-1)
        return weights @ mx.where(seen[:, None, :, None], latents, 0)

    # NOTE: the kernel runs first: it writes the columns that the reference reads.
    result = ATTENTION_TRIAL.attempt(ours)
    return result is not None and ATTENTION_TRIAL.passes(mlx, lambda: result.astype(mx.float32))


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape, mx.bfloat16, key=mx.random.key(sum(shape)))
