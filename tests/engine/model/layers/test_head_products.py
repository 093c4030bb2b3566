"""Products with a matrix for each head equal mlx-lm's, in packed steps and others."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from chairlift.engine.model.layers import head_products


class Layers(nn.Module):
    """A model with both kinds of products."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = MultiLinear(64, 32, 3)
        self.quantized: Any = MultiLinear(64, 32, 3).to_quantized(32, 8)


@pytest.mark.parametrize("name", ["plain", "quantized"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("transpose", [True, False])
def test_products_equal_those_of_mlx_lm(name: str, rows: int, length: int, transpose: bool) -> None:
    model = Layers()
    layer = getattr(model, name)
    x = mx.random.normal((rows, 3, length, 64 if transpose else 32), key=mx.random.key(0))
    expected = layer(x, transpose)
    head_products.install(model)
    assert isinstance(layer, head_products._HeadsFirst)
    result = layer(x, transpose)
    assert result.shape == expected.shape == (rows, 3, length, 32 if transpose else 64)
    assert mx.allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_a_packed_step_reads_each_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    call = MultiLinear.__call__

    def recorded(self: Any, x: mx.array, transpose: bool = True) -> Any:
        shapes.append(x.shape)
        return call(self, x, transpose)

    monkeypatch.setattr(MultiLinear, "__call__", recorded)
    model = Layers()
    head_products.install(model)
    model.plain(mx.zeros((7, 3, 1, 64)))
    assert shapes == [(1, 3, 7, 64)]
