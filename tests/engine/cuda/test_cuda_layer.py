"""Rows whose buffers are written without MLX, with NumPy instead of the CUDA kernels."""

from __future__ import annotations

import random

import pytest
from support.engine.core import build_core
from support.engine.on_cuda import ON_CUDA, _memory, on_cuda
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.messages import Abort, SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.probe import probe
from chairlift.scheduler.limits import Limits

__all__ = ["on_cuda"]


@pytest.mark.parametrize("prefix", [0, 1 << 24])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_tokens_equal_the_solo_tokens(kind: TinyKind, prefix: int, on_cuda: None) -> None:
    """While rows join, move, leave, wrap around the ring, outgrow it and are aborted."""
    model = tiny_model(kind)
    expected = tiny_model(kind)
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, kind)
    limits = Limits(4, 40, 1 << 24, geometry, chunk_multiple=8, bands=2, band_bytes=1024)
    core = build_core(model, vocabulary, limits, prefix_bytes=prefix, layers=ON_CUDA)
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
        batched = tokens.get(str(number), [])
        assert batched == solo[: len(batched)]
        assert number == 3 or len(batched) == lengths[number]


def test_chunks_of_a_prompt_are_written_in_place(on_cuda: None) -> None:
    """A chunk does not wait for the previous one, and no cache is copied."""
    model = tiny_model("llama")
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, "llama")
    core = build_core(model, vocabulary, Limits(4, 16, 1 << 24, geometry), layers=ON_CUDA)
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    core.submit(Submit("a", list(range(3, 63)), params))
    core.step()
    (cache,) = core.prefill._caches.values()
    before = [_memory(array).__array_interface__["data"] for array in cache.state]
    core.step()
    assert core.pipeline.running.queued
    assert [_memory(array).__array_interface__["data"] for array in cache.state] == before


def test_without_a_kernel_for_the_head_size_mlx_is_used() -> None:
    """For heads of 16 there is no kernel."""
    model = tiny_model("llama")
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, "llama")
    core = build_core(model, vocabulary, Limits(4, 16, 1 << 24, geometry), layers=ON_CUDA)
    assert not core.batch.queued
