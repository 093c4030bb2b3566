"""Replaces the CUDA kernels by NumPy, for tests on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from chairlift.cache.kinds import AttentionLayers
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import layer as cuda_layer
from chairlift.engine.cuda import rows as cuda_rows
from chairlift.engine.cuda.kernel import KeysValues
from chairlift.engine.cuda.layer import CudaLayer, CudaPrompt
from chairlift.engine.cuda.rows import RowMove

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
    cursor: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    rows, columns = len(queries), held.keys.shape[2]
    for buffer, array in zip(held, new, strict=True):
        _memory(buffer)[:rows, :, cursor.item() - 1] = _memory(array)[:, :, 0]
    behind = (cursor - 1 - mx.arange(columns)) % columns
    mask = (behind[None] < lengths[:, None])[:, None, None]
    # Copies: lazy operations must not see what the next step writes.
    keys, values = (mx.array(_memory(buffer)[:rows].copy()) for buffer in held)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rows, "put", _put)
    monkeypatch.setattr(cuda_rows, "move", _move)
    monkeypatch.setattr(cuda_attention, "decode_attention", _decode)
    monkeypatch.setattr(cuda_attention, "_plan", lambda *shape: None)
    monkeypatch.setattr(cuda_layer, "HEAD_DIMS", (16,))
