"""A block's kernels beside attention, emulated on the CPU: heads, SwiGLU, adapters."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from emulator.kernels import COMPILER, emulated
from support.engine.on_cuda import split_heads as expected_heads

from chairlift.engine.cuda import heads, low_rank
from chairlift.engine.cuda.heads import HeadNorms, Heads, split_heads, swiglu
from chairlift.engine.cuda.low_rank import add_low_rank

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

TOLERANCES = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 0.03}


def _random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _assert_close(actual: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    tolerance = TOLERANCES[dtype]
    assert actual.dtype == dtype
    assert mx.allclose(actual, expected, rtol=tolerance, atol=tolerance).item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("counts", "dim", "turned", "normed", "biased"),
    [
        ((4, 2), 64, 64, True, False),
        ((3, 1), 128, 128, False, True),
        ((5, 5), 80, 20, False, False),
        ((2, 1), 256, 64, True, True),
        ((1, 1), 16, 2, True, False),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5)])
def test_heads_are_split(
    shape: tuple[int, int],
    counts: tuple[int, int],
    dim: int,
    turned: int,
    normed: bool,
    biased: bool,
    dtype: mx.Dtype,
) -> None:
    """Heads that do not fill a block, and rotary embedding of all or of few numbers."""
    width = (counts[0] + 2 * counts[1]) * dim
    product = _random(*shape, width, dtype=dtype)
    norms = HeadNorms(*(_random(dim, dtype=dtype, seed=n) for n in (1, 2)), 1e-5)
    frequencies = 100.0 ** (-mx.arange(turned // 2) / max(1, turned // 2))
    bias = _random(width, dtype=dtype, seed=3) if biased else None
    form = Heads(*counts, dim, frequencies, norms if normed else None, bias)
    positions = mx.array([7, 0, 130][: shape[0]], mx.int32)
    for backwards in (False, True):
        with emulated(heads, backwards), pytest.MonkeyPatch.context() as patch:
            patch.setattr(heads, "_WARPS", 2 if backwards else 4)
            actual = split_heads(product, positions, form)
            mx.eval(actual)
        for one, other in zip(actual, expected_heads(product, positions, form), strict=True):
            assert one.shape == other.shape
            _assert_close(one, other, dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 24), (1, 65, 40)])
def test_swiglu_of_gate_and_up(shape: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """Also for gates whose exponential is infinite or 0."""
    product = _random(*shape[:2], 2 * shape[2], dtype=dtype)
    product = mx.where(mx.arange(2 * shape[2]) % 7 == 3, 100 * product, product).astype(dtype)
    with emulated(heads, backwards=False):
        actual = swiglu(product)
    gate, up = mx.split(product.astype(mx.float32), 2, axis=-1)
    assert actual.shape == shape
    _assert_close(actual, nn.silu(gate) * up, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "rank", "outputs"), [(8, 1, 5), (264, 12, 2100), (64, low_rank.MAX_RANK, 2048)]
)
def test_products_of_adapters_are_added(
    inputs: int, rank: int, outputs: int, dtype: mx.Dtype
) -> None:
    own = [1, -1, 0, 1]
    y, x = (_random(len(own), n, dtype=dtype, seed=n) for n in (outputs, inputs))
    a = (_random(2, rank, inputs, seed=1) / inputs).astype(dtype)
    b = _random(2, rank, outputs, dtype=dtype, seed=2)
    for backwards in (False, True):
        with emulated(low_rank, backwards):
            actual = add_low_rank(y, x, mx.array(own, mx.int32), a, b)
        wide = [array.astype(mx.float32) for array in (y, x, a, b)]
        rows = [
            wide[0][n] if slot < 0 else wide[0][n] + (wide[1][n] @ wide[2][slot].T) @ wide[3][slot]
            for n, slot in enumerate(own)
        ]
        _assert_close(actual, mx.stack(rows), dtype)
