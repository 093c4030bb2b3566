"""Multi-head latent attention to pages, for decode rows and prompt tokens.

All query heads of a layer share one sequence of keys. A key is a latent, which is also the value,
and a part with rotary embedding; a query has been multiplied with the matrix that would make keys
of a latent (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.2). A thread block computes
one token, some of its heads, and one span of the visible columns. If a token has several spans, the
last of its blocks merges their results.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.engine.cuda.constants import constant
from chairlift.engine.cuda.paged.arrays import TokenStep, counters
from chairlift.engine.cuda.paged.token_attention import span_of
from chairlift.engine.cuda.source import included, launch_bounds

DTYPES = (mx.float16, mx.bfloat16)
WARPS = 8
# 32 heads of a token share a block if there are so many; else 16, with more columns at once.
MANY_HEADS = 17
# Numbers that a warp computes together, of a query and of a value.
_QUERY_STEP, _VALUE_STEP = 32, 16
# See ``token_attention.SPANS``.
SPANS = ((256, 256 + 16), (768, 512 + 16))
# Results of a token's spans take at most this many bytes.
MAX_PARTIAL_BYTES = 1 << 26


def latent_attention(
    queries: mx.array,
    rotary: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    limit: int,
    scale: float,
) -> mx.array:
    """Attention of each token to the columns that it sees; writes the new tokens to the pool.

    A score is ``scale * (query x latent) + rotary query x rotary key``.

    Args:
        queries: ``[tokens, heads, 1, latent]``, float16 or bfloat16.
        rotary: ``[tokens, heads, 1, rotary]``, the queries of the rotary part, times the scale.
        new: latents and rotary keys, ``[tokens, 1, 1, latent]`` and ``[tokens, 1, 1, rotary]``.
        pool: ``[pages, 1, PAGE_TOKENS, latent]`` and ``[.., rotary]``, contiguous.
        step: the tokens' columns.
        limit: see ``token_attention``.
        scale: factor of the scores.

    Returns:
        ``[tokens, heads, 1, latent]``; undefined for tokens without columns.

    Raises:
        ValueError: there is no kernel for these shapes or types.
    """
    _check(queries, rotary, new)
    tokens, heads, _, latent = queries.shape
    _compile(queries.dtype, _groups(heads), latent, rotary.shape[3])
    span = span_of(tokens * _blocks(heads), SPANS)
    partial = tokens * heads * latent * mx.float32.size
    splits = min(-(-(limit + _columns(heads)) // span), max(1, MAX_PARTIAL_BYTES // partial))
    return _attend(queries, rotary, new, pool, step, scale, span, splits)


def _check(queries: mx.array, rotary: mx.array, new: KeysValues) -> None:
    latent, own = queries.shape[3], rotary.shape[3]
    arrays = (queries, rotary, *new)
    sides = WARPS // _groups(queries.shape[1])
    if (
        any(array.dtype != queries.dtype or array.ndim != 4 for array in arrays)
        or queries.dtype not in DTYPES
        or new.keys.shape[1:] != (1, 1, latent)
        or new.values.shape[1:] != (1, 1, own)
        or latent % _QUERY_STEP
        or own % _QUERY_STEP
        or latent % (_VALUE_STEP * sides)
    ):
        forms = ", ".join(f"{array.shape} {array.dtype}" for array in arrays)
        raise ValueError(f"no kernel for latent attention with {forms}")


def _groups(heads: int) -> int:
    """The groups of 16 heads that a block computes."""
    return 2 if heads >= MANY_HEADS else 1


def _blocks(heads: int) -> int:
    """The blocks that compute a token's heads."""
    return -(-heads // (16 * _groups(heads)))


def _columns(heads: int) -> int:
    """The columns of a tile: eight for each warp that shares heads."""
    return 8 * WARPS // _groups(heads)


@functools.cache
def _compile(dtype: mx.Dtype, groups: int, latent: int, own: int) -> None:
    """Compiles the kernels for few tokens and for many at the first call; takes seconds each."""
    heads = 16 * groups
    queries, rotary = (mx.zeros((1, heads, 1, dim), dtype) for dim in (latent, own))
    new = KeysValues(*(mx.zeros((1, 1, 1, dim), dtype) for dim in (latent, own)))
    one, zero = (mx.array([number], mx.int32) for number in (1, 0))
    step = TokenStep(mx.zeros((2,), mx.int32), zero, zero, one, one)
    for splits in (1, 2):
        # Each call has a pool of its own: the kernel writes to it.
        pool = KeysValues(*(mx.zeros((1, 1, PAGE_TOKENS, dim), dtype) for dim in (latent, own)))
        mx.eval(_attend(queries, rotary, new, pool, step, 1.0, 1024, splits))


def _attend(
    queries: mx.array,
    rotary: mx.array,
    new: KeysValues,
    pool: KeysValues,
    step: TokenStep,
    scale: float,
    span: int,
    splits: int,
) -> mx.array:
    """Launches the kernel."""
    tokens, heads, _, latent = queries.shape
    own = rotary.shape[3]
    groups, columns, blocks = _groups(heads), _columns(heads), _blocks(heads)
    many = splits > 1
    row_bytes = 2 * (latent + own + 8)
    shared = (16 * groups + columns) * row_bytes + 16 * groups * (columns + 8) * 4
    out: mx.array
    out, _, _ = _kernel(shared)(
        inputs=[
            *(queries, rotary, *new, *pool, *step),
            counters(1 << (tokens * blocks - 1).bit_length() if many else 1),
            constant(span, mx.int32),
            constant(scale, mx.float32),
        ],
        template=[
            ("T", queries.dtype),
            ("BFLOAT", queries.dtype == mx.bfloat16),
            ("LATENT", latent),
            ("ROTARY", own),
            ("GROUPS", groups),
            ("COLUMNS", columns),
            ("WARPS", WARPS),
            ("PAGE", PAGE_TOKENS),
            ("MANY", many),
        ],
        grid=(splits * WARPS * 32, blocks, tokens),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[
            queries.shape,
            (tokens, heads, splits, latent) if many else (1,),
            (tokens, heads, splits, 2) if many else (1,),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32],
    )
    return out


@functools.cache
def _kernel(shared_bytes: int) -> Any:
    """The kernel; two of its blocks fit on a processor."""
    return mx.fast.cuda_kernel(
        name="chairlift_latent",
        input_names=[
            "queries",
            "rotary",
            "new_keys",
            "new_values",
            "keys",
            "values",
            *TokenStep._fields,
            "counters",
            "span",
            "scale",
        ],
        output_names=["out", "partials", "weights"],
        header=included("ptx") + launch_bounds(WARPS * 32, 2),
        source=included("latent"),
        shared_memory=shared_bytes,
    )
