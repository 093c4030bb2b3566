"""What this device does sooner than mlx-lm's model files would, chosen when a model is loaded."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.kinds import PLAIN, AttentionLayers
from chairlift.engine.cpu import decode_attention as host_attention
from chairlift.engine.cpu import kernels
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import rows as cuda_rows
from chairlift.engine.cuda.kernel import KeysValues, decode_attention
from chairlift.engine.cuda.layer import CudaLayer, CudaPrompt
from chairlift.engine.cuda.rows import RowMove
from chairlift.engine.device import profile
from chairlift.engine.model import attention

log = logging.getLogger(__name__)

# bfloat16 has eight bits; the reference rounds in other places than the kernel.
TOLERANCE = 0.02


class Acceleration(NamedTuple):
    """Whether the model is eager now (``engine.cpu.kernels``), and the layers of its caches."""

    eager: bool
    layers: AttentionLayers = PLAIN


def accelerate(model: Any, exactly: bool = True) -> Acceleration:
    """Gives a model this device's own attention and activations, where there are some.

    Args:
        exactly: no weight may be rounded; see ``engine.cpu.bf16_linear``.
    """
    if profile.kind() == "cpu":
        eager = kernels.install(model, exactly)
        host_attention.install(model)
        return Acceleration(eager)
    if not cuda_kernels_work():
        attention.install(model)
        return Acceleration(False)
    attention.install(model, cuda_attention.attend)
    cuda_block.install(model)
    return Acceleration(False, AttentionLayers(CudaLayer, CudaPrompt))


def cuda_kernels_work() -> bool:
    """Whether decode attention by our kernels gives what MLX's own gives, here and now."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    try:
        right = all(_agrees(rows, sinks) for rows in (1, 256) for sinks in (False, True))
        right = right and all(_chunk_agrees(old) for old in (0, 50)) and _rows_agree()
    except Exception as error:  # a compiler, a driver, a device
        log.warning("no CUDA kernel for attention, MLX's own is used: %s", error)
        return False
    if not right:
        log.warning("the CUDA kernel for attention is wrong on this device; MLX's own is used")
    return right


def _agrees(rows: int, with_sinks: bool) -> bool:
    """Few rows are split among blocks, many are not; the ring wraps for some of the rows.

    The newest column is written before the reference reads the buffers.
    """
    heads, key_heads, columns, dim = 8, 2, 256, 128
    key = mx.random.key(rows)
    queries = mx.random.normal((rows, heads, 1, dim), mx.bfloat16, key=key)
    keys = mx.random.normal((rows, key_heads, columns, dim), mx.bfloat16, key=key + 1)
    values = mx.random.normal((rows, key_heads, columns, dim), mx.bfloat16, key=key + 2)
    lengths = 1 + mx.arange(rows, dtype=mx.int32) * 37 % columns
    cursor = mx.array([100], mx.int32)
    sinks = mx.random.normal((heads,), mx.bfloat16, key=key + 3) if with_sinks else None
    behind = (cursor - 1 - mx.arange(columns)) % columns
    mask = (behind[None] < lengths[:, None])[:, None, None]
    scale = dim**-0.5
    held, newest = KeysValues(keys, values), slice(99, 100)
    new = KeysValues(*(mx.contiguous(array[:, :, newest]) for array in held))
    for array in held:
        array[:, :, newest] = 0
    mx.eval(new, held)
    ours = decode_attention(queries, new, held, lengths, cursor, scale, sinks)
    mx.eval(ours)
    theirs = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )
    return bool(mx.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE).item())


def _rows_agree() -> bool:
    """A row that is put into buffers round the ring, and copied over another one."""
    held = KeysValues(*(mx.zeros((3, 2, 8, 64), mx.bfloat16) for _ in range(2)))
    new = KeysValues(*(mx.random.normal((1, 2, 9, 64), mx.bfloat16)[:, :, 4:] for _ in range(2)))
    for written in (cuda_rows.put(held, new, 1, 6), cuda_rows.move(held, [RowMove(1, 2, 6, 5)])):
        mx.eval(written)
    columns = mx.array([6, 7, 0, 1, 2])
    pairs = zip(held, new, strict=True)
    rows = [(array[row][:, columns], part[0]) for array, part in pairs for row in (1, 2)]
    return all(mx.array_equal(ours, theirs).item() for ours, theirs in rows)


def _chunk_agrees(old: int) -> bool:
    heads, key_heads, new, dim = 8, 2, 70, 128
    key = mx.random.key(old)
    queries = mx.random.normal((1, heads, new, dim), mx.bfloat16, key=key)
    keys = mx.random.normal((1, key_heads, old + new, dim), mx.bfloat16, key=key + 1)
    ours = cuda_attention.chunk_attention(queries, keys, keys, 0.1)
    mask = mx.arange(old, old + new)[:, None] >= mx.arange(old + new)
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask=mask)
    return bool(mx.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE).item())
