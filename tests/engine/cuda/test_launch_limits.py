"""No step needs a launch that CUDA does not allow: the largest ones that the settings permit."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from emulator.kernels import Kernel, kernels_of

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS, step_size
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda import gated_delta, heads
from chairlift.engine.cuda.heads import Heads, split_heads, swiglu
from chairlift.engine.cuda.paged import latent_attention, packing, put, token_attention
from chairlift.engine.cuda.paged.arrays import TokenStep
from chairlift.engine.device.impossible import CUDA_STEP_TOKENS

TOKENS = step_size(CUDA_STEP_TOKENS)


@dataclass(frozen=True, kw_only=True)
class CheckedKernel(Kernel):
    """A kernel whose launch is only checked; nothing is allocated, because nobody evaluates it."""

    def launch(
        self,
        inputs: list[mx.array],
        constants: list[str],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


def _pair(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> KeysValues:
    return KeysValues(mx.zeros(shape, dtype), mx.zeros(shape, dtype))


def _step() -> TokenStep:
    numbers = mx.zeros((TOKENS,), mx.int32)
    return TokenStep(mx.zeros((9,), mx.int32), *[numbers] * 4)


@pytest.mark.parametrize("rows_and_heads", [(256, 256), (512, 128), (1024, 64), (4096, 64)])
def test_states_of_many_rows(rows_and_heads: tuple[int, int]) -> None:
    """Nemotron-H's largest models have 256 heads of such states."""
    rows, count = rows_and_heads
    keys = mx.zeros((rows, 1, 1, 128), mx.bfloat16)
    values, decays = mx.zeros((rows, 1, count, 64)), mx.zeros((rows, 1, count))
    state = mx.zeros((rows, count, 64, 128))
    with kernels_of(CheckedKernel, gated_delta):
        output, after = gated_delta.decayed(keys, keys, values, decays, state)
        assert output.shape == values.shape
        assert after.shape == state.shape
        gated_delta.gated_delta(keys, keys, values.astype(keys.dtype), decays, decays, state)


def test_attention_of_as_many_tokens_as_a_step_may_have() -> None:
    with kernels_of(CheckedKernel, token_attention, packing, put):
        queries, new = mx.zeros((TOKENS, 64, 1, 64)), _pair(TOKENS, 8, 1, 64, dtype=mx.float32)
        pool = _pair(9, 8, PAGE_TOKENS, 64, dtype=mx.float32)
        token_attention.token_attention(queries, new, pool, _step(), 1 << 20, 1.0)
        quantization = Quantization(8, 64)
        packed = KeysValues(*map(quantization.pack, pool))
        packing.pack(new, packed, *_step()[:2], _step().stops, quantization)
        put.put(pool, _pair(1, 8, TOKENS, 64, dtype=mx.float32), mx.zeros((TOKENS,), mx.int32))


def test_latent_attention_of_as_many_tokens_as_a_step_may_have() -> None:
    queries, rotary = (mx.zeros((TOKENS, 128, 1, dim), mx.bfloat16) for dim in (512, 64))
    new, pool = (
        KeysValues(*(mx.zeros((*shape, dim), mx.bfloat16) for dim in (512, 64)))
        for shape in ((TOKENS, 1, 1), (9, 1, PAGE_TOKENS))
    )
    with kernels_of(CheckedKernel, latent_attention):
        latent_attention.latent_attention(queries, rotary, new, pool, _step(), 1 << 20, 1.0)


def test_blocks_of_as_many_tokens_as_a_step_may_have() -> None:
    form = Heads(64, 8, 128, mx.zeros((64,)), None, None)
    with kernels_of(CheckedKernel, heads):
        for shape in ((TOKENS, 1), (1, TOKENS)):
            product = mx.zeros((*shape, 80 * 128), mx.bfloat16)
            split_heads(product, mx.zeros(shape[:1], mx.int32), form)
            swiglu(mx.zeros((*shape, 2 * 28_672), mx.bfloat16))


def test_a_launch_that_cuda_refuses_is_an_error() -> None:
    form = Heads(64, 8, 128, mx.zeros((64,)), None, None)
    product = mx.zeros((1 << 16, 1, 80 * 128), mx.bfloat16)
    with (
        kernels_of(CheckedKernel, heads),
        pytest.raises(RuntimeError, match="chairlift_split_heads: a grid of"),
    ):
        split_heads(product, mx.zeros((1 << 16,), mx.int32), form)
