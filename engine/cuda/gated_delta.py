"""A CUDA kernel for the gated delta rule and for states that decay.

MLX has one for the former on Metal only. One launch computes all tokens, where MLX's operations
need several for each token of a prompt, and read the state several times in a decode step. The
state of a head is divided among warps, which keep it in registers; see
``engine.model.layers.gated_delta`` and ``engine.model.layers.decayed`` for the rules.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import mlx.core as mx

from chairlift.engine.cuda.source import included
from chairlift.engine.model.layers.decayed import decayed_attention
from chairlift.engine.model.layers.gated_delta import gated_delta_blocks
from chairlift.engine.model.trials.trial import Trial, within_largest

log = logging.getLogger(__name__)

# Lines of the state of a block of threads, with eight threads each.
_LINES = 16
# Key dimensions: a thread has an eighth of them in registers, with those of two tokens.
_MAX_DIM, _MAX_VECTOR_DIM = 256, 128
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_TRIAL = Trial(
    within_largest(0.02),
    log,
    error="no CUDA kernel for recurrent layers: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for recurrent layers is wrong on this device; it is not used",
)


def by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array] | None:
    """As ``gated_delta``; None for arrays that the kernel does not take, or computes wrong here."""
    dim, vector = q.shape[-1], g.ndim == 4
    same_types = q.dtype == k.dtype == v.dtype and state.dtype == mx.float32
    fits = dim % 32 == 0 and dim <= (_MAX_VECTOR_DIM if vector else _MAX_DIM)
    if q.dtype not in _DTYPES or not same_types or not fits:
        return None
    rows, tokens, heads, _ = v.shape
    if beta.shape != (rows, tokens, heads) or (mask is not None and mask.shape != (rows, tokens)):
        return None
    if not _shapes_agree(q, k, v, g, state):
        return None
    if not kernel_works(dim, v.shape[-1], vector, q.dtype):
        return None
    return gated_delta(q, k, v, g, beta, state, mask)


def _shapes_agree(q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array) -> bool:
    """Whether the shapes are those of ``gated_delta_blocks``: the kernel relies on it."""
    rows, tokens, key_heads, dim = k.shape
    heads, value_dim = v.shape[2:]
    decays = rows, tokens, heads
    return (
        tokens > 0
        and q.shape == k.shape
        and v.shape[:2] == (rows, tokens)
        and heads % key_heads == 0
        and g.shape in (decays, (*decays, dim))
        and state.shape == (rows, heads, value_dim, dim)
    )


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As ``gated_delta_blocks``, for arrays that fit. Outputs of masked tokens are 0.

    Args:
        q, k, v: of one type.
        g, beta: each of any type with 16 or 32 bits.
        state: float32.
    """
    return _launch(q, k, v, g, beta, state, mask, q.dtype)


def decayed_by_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
) -> tuple[mx.array, mx.array] | None:
    """As ``decayed``; None for arrays that the kernel does not take, or computes wrong here."""
    dim = q.shape[-1]
    if q.dtype not in _DTYPES or k.dtype != q.dtype or dim % 32 or dim > _MAX_DIM:
        return None
    if g.ndim != 3 or not _shapes_agree(q, k, v, g, state):
        return None
    if not decayed_works(dim, v.shape[-1], q.dtype):
        return None
    return decayed(q, k, v, g, state)


def decayed(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """As ``decayed_attention``, with decays in place of logarithms, and the state transposed.

    Args:
        q, k: ``[rows, tokens, groups, key dim]``, of one type.
        v: ``[rows, tokens, heads, value dim]``.
        g: decays, ``[rows, tokens, heads]``.
        state: ``[rows, heads, value dim, key dim]``.

    Returns:
        Outputs ``[rows, tokens, heads, value dim]`` and the state, both in float32.
    """
    return _launch(q, k, v, g, None, state.astype(mx.float32), None, mx.float32)


def _launch(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array | None,
    state: mx.array,
    mask: mx.array | None,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array]:
    """Launches the kernel: the gated delta rule, or without ``beta`` a state that decays."""
    rows, tokens, key_heads, dim = k.shape
    heads, value_dim = v.shape[2:]
    # Something in the place of betas, which is not read.
    inputs = [q, k, v, g, g if beta is None else beta, state]
    if mask is not None:
        inputs.append(mask.astype(mx.int32))
    output, new_state = _kernel(mask is not None)(
        inputs=inputs,
        template=[
            *(("T", q.dtype), ("OUT", dtype), ("DK", dim), ("DV", value_dim), ("HEADS", heads)),
            *(("KEY_HEADS", key_heads), ("LINES", _LINES)),
            *(("VECTOR", g.ndim == 4), ("DELTA", beta is not None)),
        ],
        # CUDA allows only 65,535 blocks in the other dimensions, and rows may have more heads.
        grid=(rows * heads * -(-value_dim // _LINES) * _LINES * 8, 1, 1),
        threadgroup=(_LINES * 8, 1, 1),
        output_shapes=[(rows, tokens, heads, value_dim), state.shape],
        output_dtypes=[dtype, mx.float32],
    )
    return output, new_state


@functools.cache
def kernel_works(dim: int, value_dim: int, vector: bool, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what ``gated_delta_blocks`` does, for heads of these sizes."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    rows, tokens, key_heads, heads = 2, 9, 1, 2
    keys = mx.random.split(mx.random.key(0), 6)
    q, k = (
        mx.random.normal((rows, tokens, key_heads, dim), scale=dim**-0.5, key=key).astype(dtype)
        for key in keys[:2]
    )
    v = mx.random.normal((rows, tokens, heads, value_dim), dtype, key=keys[2])
    decays = (rows, tokens, heads, dim) if vector else (rows, tokens, heads)
    g, beta = mx.random.uniform(0.5, 1, decays, key=keys[3]), mx.full((rows, tokens, heads), 0.5)
    state = mx.random.normal((rows, heads, value_dim, dim), key=keys[4])
    return _TRIAL.passes(
        lambda: _joined(gated_delta_blocks(q, k, v, g, beta, state)),
        lambda: _joined(gated_delta(q, k, v, g, beta, state)),
    )


@functools.cache
def decayed_works(dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what ``decayed_attention`` does, for heads of these sizes."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    rows, tokens, groups, heads = 2, 9, 1, 2
    keys = mx.random.split(mx.random.key(0), 5)
    q, k = (
        mx.random.normal((rows, tokens, groups, dim), scale=dim**-0.5, key=key).astype(dtype)
        for key in keys[:2]
    )
    v = mx.random.normal((rows, tokens, heads, value_dim), key=keys[2])
    g = mx.random.uniform(0.5, 1, (rows, tokens, heads), key=keys[3])
    state = mx.random.normal((rows, heads, value_dim, dim), key=keys[4])

    def expected() -> mx.array:
        output, after = decayed_attention(q, k, v, mx.log(g), state.swapaxes(2, 3))
        return _joined((output, after.swapaxes(2, 3)))

    return _TRIAL.passes(expected, lambda: _joined(decayed(q, k, v, g, state)))


def _joined(results: tuple[mx.array, mx.array]) -> mx.array:
    return mx.concatenate([result.astype(mx.float32).flatten() for result in results])


@functools.cache
def _kernel(masked: bool) -> Any:
    return mx.fast.cuda_kernel(
        name=f"chairlift_gated_delta{'_masked' * masked}",
        input_names=["q", "k", "v", "g", "beta", "state", *["mask"] * masked],
        output_names=["y", "new_state"],
        header=f"#define MASKED {int(masked)}\n",
        source=included("gated_delta"),
    )
