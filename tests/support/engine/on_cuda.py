"""Replaces the CUDA kernels by NumPy, for tests on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from chairlift.cache.kinds import AttentionLayers
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import layer as cuda_layer
from chairlift.engine.cuda import low_rank as cuda_low_rank
from chairlift.engine.cuda import rows as cuda_rows
from chairlift.engine.cuda.heads import Heads, SplitHeads
from chairlift.engine.cuda.kernel import KeysValues
from chairlift.engine.cuda.layer import CudaLayer, CudaPrompt
from chairlift.engine.cuda.rows import RowMove
from chairlift.engine.model.compiled import CompiledSteps

ON_CUDA = AttentionLayers(CudaLayer, CudaPrompt)


def _memory(array: mx.array) -> np.ndarray[Any, Any]:
    mx.eval(array)
    mx.synchronize()  # as on the device, which runs operations in the order of launch
    return np.array(array, copy=False)


def _put(held: KeysValues, new: KeysValues, row: int, column: int) -> mx.array:
    for buffer, array in zip(held, new, strict=True):
        memory, tokens = _memory(buffer), array.shape[2]
        memory[row, :, np.arange(column, column + tokens) % memory.shape[2]] = _memory(array)[
            0
        ].swapaxes(0, 1)
    return mx.array([1])


def _move(held: KeysValues, moves: Sequence[RowMove]) -> mx.array:
    for buffer in held:
        memory = _memory(buffer)
        for row, to, column, tokens in moves:
            columns = np.arange(column, column + tokens) % memory.shape[2]
            memory[to][:, columns] = memory[row][:, columns]
    return mx.array([1])


def _decode(
    queries: mx.array,
    new: KeysValues,
    held: KeysValues,
    lengths: mx.array,
    stops: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    rows, columns = len(queries), held.keys.shape[2]
    for buffer, array in zip(held, new, strict=True):
        _memory(buffer)[np.arange(rows), :, np.array(stops) - 1] = _memory(array)[:, :, 0]
    behind = (stops[:, None] - 1 - mx.arange(columns)) % columns
    mask = (behind < lengths[:, None])[:, None, None]
    # Copies: lazy operations must not see what the next step writes.
    keys, values = (mx.array(_memory(buffer)[:rows].copy()) for buffer in held)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


TRACES: list[int] = []


def decode_in_trace(
    queries: mx.array,
    new: KeysValues,
    cached: KeysValues,
    lengths: mx.array,
    stops: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention without side effects, as a trace requires."""
    TRACES.append(len(queries))
    rows, columns = len(queries), cached.keys.shape[2]
    column = mx.arange(columns)
    newest = (column == stops[:, None] - 1)[:, None, :, None]
    keys, values = (
        mx.where(newest, value, buffer[:rows]) for value, buffer in zip(new, cached, strict=True)
    )
    mask = ((stops[:, None] - 1 - column) % columns < lengths[:, None])[:, None, None]
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def traceable(*given: object) -> mx.array:
    """Decodes on the host; a trace cannot, and uses the version without side effects."""
    try:
        return _decode(*given)  # type: ignore[arg-type]
    except Exception:
        return decode_in_trace(*given)  # type: ignore[arg-type]


class ComparedSteps(CompiledSteps):
    """Runs each step uncompiled, and compares its result with the compiled one's.

    The kernels of compiled steps here write nothing, unlike CUDA's.
    """

    compared = 0

    def __call__(self, band, tokens):  # type: ignore[no-untyped-def]
        plain = self._plain(band, tokens)
        mx.eval(plain)
        if not self._gives_up and self._is_steady(band):
            compiled = self._compiled(band, tokens)
            assert mx.allclose(compiled, plain, rtol=1e-3, atol=1e-3).item()
            self.compared += 1
        return plain


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rows, "put", _put)
    monkeypatch.setattr(cuda_rows, "move", _move)
    monkeypatch.setattr(cuda_attention, "decode_attention", _decode)
    monkeypatch.setattr(cuda_attention, "_plan", lambda *shape: None)
    monkeypatch.setattr(cuda_layer, "HEAD_DIMS", (16,))


def split_heads(product: mx.array, positions: mx.array, heads: Heads) -> SplitHeads:
    rows, length, _ = product.shape
    if heads.bias is not None:
        product = product + heads.bias
    separate = product.reshape(rows, length, -1, heads.dim).swapaxes(1, 2)
    ends = [heads.heads, heads.heads + heads.key_heads]
    queries, keys, values = mx.split(separate, ends, axis=1)
    if heads.norms is not None:
        queries = mx.fast.rms_norm(queries, heads.norms.query, heads.norms.eps)
        keys = mx.fast.rms_norm(keys, heads.norms.key, heads.norms.eps)
    rotated = (
        mx.fast.rope(
            x,
            2 * heads.frequencies.size,
            traditional=False,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=1 / heads.frequencies,
        )
        for x in (queries, keys)
    )
    return SplitHeads(*rotated, values)


def _swiglu(product: mx.array) -> mx.array:
    gate, up = mx.split(product, 2, axis=-1)
    return nn.silu(gate) * up


LOW_RANK_CALLS: list[int] = []


def _add_low_rank(y: mx.array, x: mx.array, own: mx.array, a: mx.array, b: mx.array) -> mx.array:
    LOW_RANK_CALLS.append(len(y))
    chosen = mx.maximum(own, 0)
    wide = (x[:, None] @ a[chosen].swapaxes(1, 2) @ b[chosen])[:, 0]
    return y + mx.where(own[:, None] >= 0, wide, 0)


@pytest.fixture
def low_rank_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    LOW_RANK_CALLS.clear()
    monkeypatch.setattr(cuda_low_rank, "works", lambda: True)
    monkeypatch.setattr(cuda_low_rank, "add_low_rank", _add_low_rank)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_block, "split_heads", split_heads)
    monkeypatch.setattr(cuda_block, "swiglu", _swiglu)
