"""Rows whose buffers are written to without MLX, with NumPy in the place of the CUDA kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference import solo_tokens
from tiny import TinyKind, tiny_model

from chairlift.cache.kinds import Layers
from chairlift.engine.core.core import EngineCore
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.cuda import layer as cuda_layer
from chairlift.engine.cuda import rows as cuda_rows
from chairlift.engine.cuda.kernel import KeysValues
from chairlift.engine.cuda.layer import CudaLayer, CudaPrompt
from chairlift.engine.cuda.rows import RowMove
from chairlift.engine.messages import Abort, SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.probe import probe
from chairlift.scheduler.limits import Limits

ON_CUDA = Layers(CudaLayer, CudaPrompt)


def _memory(array: mx.array) -> np.ndarray[Any, Any]:
    mx.eval(array)
    mx.synchronize()  # the device does one thing after the other, as they were launched
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
    # Copies: what is computed later must not see what the next step writes.
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


@pytest.mark.parametrize("prefix", [0, 1 << 24])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_tokens_are_those_of_the_sequences_alone(
    kind: TinyKind, prefix: int, on_cuda: None
) -> None:
    """While rows join, move, leave, wrap round the ring, outgrow it and are aborted."""
    model = tiny_model(kind)
    expected = tiny_model(kind)
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, kind)
    limits = Limits(4, 40, 1 << 24, geometry, chunk_multiple=8, bands=2, band_bytes=1024)
    core = EngineCore(model, vocabulary, limits, prefix_bytes=prefix, layers=ON_CUDA)
    assert core.batch.queued
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    prompts[9] = prompts[2] + [5, 6]
    lengths = [rng.randint(1, 70) for _ in prompts]
    tokens: dict[str, list[int]] = {}
    waiting = list(enumerate(prompts))
    while waiting or not core.idle:
        if waiting and rng.random() < 0.2:
            number, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=lengths[number], seed=0, temperature=0.0)
            core.submit(Submit(str(number), prompt, params))
        if rng.random() < 0.01:
            core.abort(Abort("3", "abort"))
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        for band in core.batch.bands:
            band.check_integrity()
    for number, prompt in enumerate(prompts):
        solo = solo_tokens(expected, prompt, lengths[number])
        ours = tokens.get(str(number), [])
        assert ours == solo[: len(ours)]
        assert number == 3 or len(ours) == lengths[number]


def test_prompts_in_chunks_are_written_where_they_are(on_cuda: None) -> None:
    """No step of theirs waits for the one before: nothing of a cache is copied."""
    model = tiny_model("llama")
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, "llama")
    core = EngineCore(model, vocabulary, Limits(4, 16, 1 << 24, geometry), layers=ON_CUDA)
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    core.submit(Submit("a", list(range(3, 63)), params))
    core.step()
    (cache,) = core.prompts._caches.values()
    before = [_memory(array).__array_interface__["data"] for array in cache.state]
    core.step()
    assert core._running.queued
    assert [_memory(array).__array_interface__["data"] for array in cache.state] == before


def test_keys_without_a_kernel_are_left_to_mlx() -> None:
    """Heads of 16, for which there is none."""
    model = tiny_model("llama")
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, "llama")
    core = EngineCore(model, vocabulary, Limits(4, 16, 1 << 24, geometry), layers=ON_CUDA)
    assert not core.batch.queued
