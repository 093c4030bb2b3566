"""Products with a matrix for each head equal MLX's, for few and for many tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from chairlift.cache.kinds import make_batch
from chairlift.engine.cpu import kernels
from chairlift.engine.cpu.attention import heads
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.layers import head_products

HEADS, INPUTS, OUTPUTS = 3, 64, 32


class Layers(nn.Module):
    """A model with each kind of products."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = MultiLinear(INPUTS, OUTPUTS, HEADS)
        self.affine: Any = MultiLinear(INPUTS, OUTPUTS, HEADS).to_quantized(32, 4)
        self.mxfp8: Any = MultiLinear(INPUTS, OUTPUTS, HEADS).to_quantized(32, 8, "mxfp8")


@pytest.mark.parametrize("name", ["plain", "affine", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("length", [1, 5, 70])
@pytest.mark.parametrize("own", [1, HEADS])
@pytest.mark.parametrize("transpose", [True, False])
def test_products_are_mlxs(name: str, rows: int, length: int, own: int, transpose: bool) -> None:
    model = Layers()
    layer = getattr(model, name)
    x = mx.random.normal((rows, own, length, INPUTS if transpose else OUTPUTS))
    expected = layer(x, transpose)
    head_products.install(model)
    assert heads.install(model) == 3
    assert heads.install(model) == 0
    result = layer(x, transpose)
    assert result.shape == expected.shape
    assert mx.allclose(result, expected, rtol=1e-4, atol=1e-4)
    narrow = layer(x.astype(mx.float16), transpose)
    assert narrow.shape == expected.shape


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "kimi_linear"])
def test_prompts_are_mlx_lms(name: str) -> None:
    tokens = mx.random.randint(0, 64, (1, 50))
    expected = tiny_model(name)(tokens)
    model = tiny_model(name)
    adapt(model)
    kernels.install(model)
    batch = make_batch(model, None)
    batch.join(columns=64)
    with batch.step(50):
        logits = model(tokens, cache=batch.layers)
    assert mx.allclose(logits, expected, rtol=1e-3, atol=1e-3)
