"""Products of few tokens: the CUDA kernel itself, emulated on the CPU."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given
from hypothesis import strategies as st
from support.engine.on_cuda import kernels

from chairlift.engine.cuda import fused_linear, skinny
from chairlift.engine.cuda.fused_linear import fuse_linears
from chairlift.engine.cuda.skinny import (
    MAX_TOKENS,
    Norm,
    SkinnyLinear,
    block_of,
    skinny_product,
)

__all__ = ["kernels"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")


def _random(*shape: int, dtype: mx.Dtype, seed: int, scale: float = 1.0) -> mx.array:
    return mx.random.normal(shape, scale=scale, key=mx.random.key(seed)).astype(dtype)


def _expected(
    x: mx.array, weight: mx.array, norm: Norm | None, gated: bool, to: mx.array | None
) -> mx.array:
    x = x.astype(mx.float32)
    if norm is not None:
        x = mx.fast.rms_norm(x, norm.weight.astype(mx.float32), norm.eps)
    y = x @ weight.T.astype(mx.float32)
    if gated:
        gate, up = mx.split(y, 2, axis=1)
        y = nn.silu(gate) * up
    return y if to is None else y + to.astype(mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("tokens", "processors"), [(1, 100), (1, 2), (8, 3), (9, 4), (MAX_TOKENS, 2)]
)
@pytest.mark.parametrize("form", ["plain", "sum", "norm", "swiglu", "all"])
def test_few_tokens(
    form: str, tokens: int, processors: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one to four times 16 rows, and of four to 16 warps."""
    monkeypatch.setattr(skinny, "_PROCESSORS", processors)
    dtype = mx.float16 if form == "sum" else mx.bfloat16
    outputs, inputs = 192, 64 * (7 if tokens % 2 else 11)
    x = _random(tokens, inputs, dtype=dtype, seed=tokens, scale=3.0)
    weight = _random(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    gated = form in ("swiglu", "all")
    norm = Norm(_random(inputs, dtype=dtype, seed=2), 1e-5) if form in ("norm", "all") else None
    width = outputs // 2 if gated else outputs
    to = _random(tokens, width, dtype=dtype, seed=3) if form in ("sum", "all") else None
    with emulated(skinny, backwards):
        actual = skinny_product(x, weight, norm, gated, to)
    expected = _expected(x, weight, norm, gated, to)
    assert actual.dtype == dtype
    assert mx.allclose(actual, expected, rtol=0.01, atol=0.02 * mx.abs(expected).max()).item()


@given(st.integers(1, 2000), st.booleans())
def test_blocks_cover_all_rows(pairs: int, gated: bool) -> None:
    """A fit weight has a multiple of 32 rows."""
    rows, warps = block_of(2 * pairs, gated)
    assert 2 * pairs % rows == 0
    assert not gated or rows % 2 == 0
    assert rows in (1, 2, 3, 4)
    assert warps in (4, 8, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (2, 8), (17, 1)])
def test_a_product_is_the_same_whatever_computes_it(
    shape: tuple[int, int], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, kernels: None
) -> None:
    inputs, outputs = 128, 64
    layers = [nn.Linear(inputs, outputs, bias=False) for _ in range(2)]
    norm = nn.RMSNorm(inputs)
    for module in (*layers, norm):
        module.set_dtype(dtype)
    x, to = (_random(*shape, n, dtype=dtype, seed=n) for n in (inputs, 2 * outputs))
    results = []
    calls: list[int] = []
    for has_kernel in (False, True):
        monkeypatch.setattr(fused_linear, "kernel_works", lambda dtype, has=has_kernel: has)
        product = fuse_linears(layers)
        assert product is not None
        with emulated(skinny, backwards=False):
            monkeypatch.setattr(
                fused_linear,
                "skinny_product",
                lambda x, *more, **options: (
                    calls.append(len(x)) or skinny_product(x, *more, **options)
                ),
            )
            results.append(
                [
                    product(x),
                    product.added(x, to),
                    product.normed(x, norm),
                    product.gated(x, norm),
                ]
            )
    tokens = shape[0] * shape[1]
    expected_calls = {1: 1, 16: 4, 17: 0}[tokens] + (
        2 if tokens == 1 and dtype == mx.bfloat16 else 0
    )
    assert calls == [tokens] * expected_calls
    for plain, ours in zip(*results, strict=True):
        assert plain.shape == ours.shape
        assert plain.dtype == ours.dtype
        assert mx.allclose(ours, plain, rtol=0.02, atol=0.02 * mx.abs(plain).max()).item()


def test_no_tokens_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would read the last of them."""
    monkeypatch.setattr(fused_linear, "kernel_works", lambda dtype: True)
    monkeypatch.setattr(fused_linear, "skinny_product", lambda *_: pytest.fail("launched"))
    layer, norm = nn.Linear(128, 64, bias=False), nn.RMSNorm(128)
    for module in (layer, norm):
        module.set_dtype(mx.bfloat16)
    product = fuse_linears([layer])
    assert product is not None
    x, to = (mx.zeros((0, 1, n), mx.bfloat16) for n in (128, 64))
    for result in (product(x), product.added(x, to), product.normed(x, norm)):
        assert result.shape == (0, 1, 64)


def test_linear_layers_of_a_model_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "kernel_works", lambda dtype: True)
    plain, biased, odd = nn.Linear(128, 64, False), nn.Linear(128, 64), nn.Linear(100, 64, False)
    model = nn.Sequential(plain, biased, odd)
    model.set_dtype(mx.bfloat16)
    skinny.install(model, [])
    assert [type(layer) for layer in model.layers] == [SkinnyLinear, nn.Linear, nn.Linear]
    assert isinstance(plain, nn.Linear)
    for tokens in (1, 5, MAX_TOKENS, MAX_TOKENS + 1):
        x = _random(tokens, 1, 128, dtype=mx.bfloat16, seed=tokens)
        with emulated(skinny, backwards=True):
            actual = plain(x)
        assert mx.allclose(actual, x @ plain.weight.T, rtol=0.02, atol=0.02).item()
