"""Functions of numbers of arrays with any strides, compared with NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import compiled_maps
from chairlift.engine.cpu.compiled.jobs import run_shared
from chairlift.engine.cpu.compiled.llvm import kernel, maps

Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs the extra jit")

REFERENCES: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "copy": np.positive,
    "negative": np.negative,
    "absolute": np.abs,
    "square": np.square,
    "cube": lambda x: x.astype(np.float64) ** 3,
    "root": np.sqrt,
    "inverse_root": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x.astype(np.float64))),
    "tanh": np.tanh,
    "silu": lambda x: x / (1 + np.exp(-x.astype(np.float64))),
    "gelu_approx": lambda x: x / (1 + np.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3.0))),
}


def test_every_function_has_a_reference() -> None:
    assert set(REFERENCES) == {*maps.UNARY, *maps.BINARY}


@pytest.mark.parametrize("name", REFERENCES)
def test_functions_are_numpys_for_arrays_with_any_strides(name: str) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    computed = 0
    for _ in range(60):
        shape = _shape(rng)
        inputs = [_array(rng, shape) for _ in range(2 if name in maps.BINARY else 1)]
        if "root" in name:
            inputs = [np.abs(inputs[0])]
        into = _array(rng, shape, repeats=False)
        before = into.copy()
        if not compiled_maps.mapped(name, inputs, into, run_shared):
            assert np.array_equal(into, before)
            continue
        computed += 1
        np.testing.assert_allclose(into, REFERENCES[name](*inputs), rtol=2e-6, atol=1e-7)
    assert computed > 20


def test_values_that_are_not_finite_are_numpys() -> None:
    x = np.array([np.nan, 1, np.inf, -np.inf, -0.0, 0.0, 2, np.nan] * 5, np.float32)
    y = np.roll(x, 3)
    for name in ("add", "maximum", "minimum", "multiply"):
        into = np.empty_like(x)
        with np.errstate(invalid="ignore"):
            assert compiled_maps.mapped(name, [x, y], into, run_shared)
            np.testing.assert_array_equal(into, REFERENCES[name](x, y))
    assert compiled_maps.mapped("copy", [x], into, run_shared)
    assert into.tobytes() == x.tobytes()


@pytest.mark.parametrize("name", maps.UNARY)
def test_functions_of_lines_on_all_cores(name: str) -> None:
    x = np.abs(np.random.default_rng(0).normal(size=(300, 77))).astype(np.float32)
    result = compiled_maps.of_lines(name, x)
    assert result is not None
    np.testing.assert_allclose(result, REFERENCES[name](x), rtol=2e-6, atol=1e-7)


def test_sums_of_lines() -> None:
    rng = np.random.default_rng(0)
    computed = 0
    for _ in range(60):
        shape = _shape(rng)
        x = _array(rng, shape)
        into = np.zeros((*shape[:-1], 1), np.float32)
        if compiled_maps.summed(x, into, run_shared):
            computed += 1
            expected = x.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(into, expected, rtol=1e-5, atol=1e-5)
    assert computed > 20


def test_the_sum_of_a_line_does_not_depend_on_the_others() -> None:
    x = np.random.default_rng(1).normal(size=(9, 5, 130)).astype(np.float32)
    together, alone = np.zeros((9, 5, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    assert compiled_maps.summed(x, together, run_shared)
    for row, column in np.ndindex(9, 5):
        one = x[row : row + 1, column : column + 1]
        assert compiled_maps.summed(one, alone, run_shared)
        assert alone[0, 0, 0] == together[row, column, 0]


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.choice([1, 2, 3, 7, 16, 33, 64])) for _ in range(rng.integers(1, 5)))


def _array(rng: np.random.Generator, shape: tuple[int, ...], repeats: bool = True) -> Floats:
    """Numbers whose axes may be in any order, have gaps, or repeat a number."""
    order = rng.permutation(len(shape))
    wide = [shape[axis] * (2 if rng.random() < 0.2 else 1) for axis in order]
    whole = rng.normal(size=wide).astype(np.float32).transpose(np.argsort(order))
    array: Floats = whole[tuple(slice(0, size) for size in shape)]
    if repeats and rng.random() < 0.3:
        axis = int(rng.integers(len(shape)))
        array = np.broadcast_to(array.take([0], axis=axis), shape)
    return array
