"""Batched small matrix products equal NumPy's, for any memory layout of the second operand."""

from __future__ import annotations

import numpy as np
import pytest

from chairlift.engine.cpu.gemm import Floats, products


def _tokens_first(rows: int, heads: int, k: int, n: int) -> Floats:
    """The layout of a model's new keys: for each token, all heads in a row."""
    return _numbers(rows, k, heads, n).swapaxes(1, 2)


def _part_of_a_buffer(rows: int, heads: int, k: int, n: int) -> Floats:
    return _numbers(rows + 1, heads, k + 3, n)[:rows, :, 1 : k + 1]


def _contiguous(rows: int, heads: int, k: int, n: int) -> Floats:
    return _numbers(rows, heads, k, n)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", [_tokens_first, _part_of_a_buffer, _contiguous])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_products(rows: int, heads: int, layout: object, transposed: bool) -> None:
    assert callable(layout)
    a = _numbers(rows, heads, 5, 16 if transposed else 7)
    b = layout(rows, heads, 7, 16)
    b = b.swapaxes(-1, -2) if transposed else b
    assert np.allclose(products(a, b, 0.5), 0.5 * a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [0, 4, 8])
@pytest.mark.parametrize(("k", "n"), [(7, 1), (1, 7), (1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_axis_of_one_may_have_any_stride(
    k: int, n: int, stride: int, transposed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLX's arrays have such strides; BLAS refuses them and leaves the result unchanged."""
    a, b = _numbers(2, 3, 5, k), _numbers(2, 3, *((n, k) if transposed else (k, n)))
    b = b.swapaxes(-1, -2) if transposed else b
    odd = tuple(s if size > 1 else stride for s, size in zip(b.strides, b.shape, strict=True))
    strided = np.lib.stride_tricks.as_strided(b, strides=odd)
    assert np.allclose(products(a, strided), a @ b, rtol=1e-4, atol=1e-4)
    assert capfd.readouterr() == ("", "")


def _numbers(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
