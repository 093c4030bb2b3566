"""Products by Intel's matrix units are as exact as in float32, for all shapes and threads."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import amx_matmul
from chairlift.engine.cpu.compiled.amx_matmul import AmxMatrix
from chairlift.engine.cpu.compiled.jobs import run_shared
from chairlift.engine.cpu.compiled.llvm import amx as llvm_amx
from chairlift.engine.cpu.compiled.llvm.amx import INPUTS, PIECES, ROWS
from chairlift.engine.cpu.compiled.worker_threads import shared
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import aligned

pytestmark = pytest.mark.skipif(
    not amx_matmul.available(), reason="llvmlite is not installed, or this CPU has no AMX"
)


@pytest.fixture(autouse=True)
def _threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(amx_matmul, "MIN_SHARED", 1 << 10)
    monkeypatch.setattr(amx_matmul, "MIN_SHARED_WEIGHTS", 1 << 10)
    before = shared.get()
    yield
    shared.set(before)


def test_three_bfloat16_pieces_sum_to_the_number() -> None:
    x = np.random.default_rng(0).normal(size=(37, 3 * INPUTS)).astype(np.float32)
    x[0, :4] = [0.0, -0.0, 1e30, 1e-30]
    high, middle, low = _pieces(x)
    assert np.array_equal(high + (middle + low), x)
    assert not np.array_equal(high + middle, x)


@given(
    tokens=st.integers(0, 150),
    inputs=st.integers(1, 1700),
    outputs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    threads=st.integers(1, 4),
    strided=st.booleans(),
    memory=st.sampled_from([1, 1 << 18, 1 << 20]),
    steps=st.sampled_from([1, 7, 48]),
)
@settings(max_examples=80, deadline=None)
def test_products_are_as_exact_as_in_float32(
    tokens: int,
    inputs: int,
    outputs: list[int],
    threads: int,
    strided: bool,
    memory: int,
    steps: int,
) -> None:
    rng = np.random.default_rng(inputs)
    weights = [mx.array(rng.normal(size=(count, inputs)).astype(np.float32)) for count in outputs]
    weights = [each.astype(mx.bfloat16).astype(mx.float32) for each in weights]
    x = rng.normal(size=(tokens, 2 * inputs)).astype(np.float32)
    x = x[:, ::2] if strided else np.ascontiguousarray(x[:, :inputs])
    shared.set(threads)
    matrix = AmxMatrix(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx_matmul, "_PIECES_BYTES", memory)
        patch.setattr(amx_matmul, "_STEPS", steps)
        product = matrix(x).copy()
        exact = np.concatenate([np.array(each) for each in weights]).astype(np.float64).T
        assert product.shape == (tokens, sum(outputs))
        assert np.all(np.abs(product - x @ exact) <= 2.0**-20 * (np.abs(x) @ np.abs(exact)))
        if tokens:
            assert np.array_equal(matrix(x[-1:])[0], product[-1])


def test_a_token_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    weight = mx.random.normal((64, 96), key=mx.random.key(0)).astype(mx.bfloat16)
    matrix = AmxMatrix([weight.astype(mx.float32)])
    x = np.random.default_rng(1).normal(size=(40, 96)).astype(np.float32)
    expected = matrix(x).copy()
    for value in (np.inf, np.nan):
        x[5, 7] = value
        product = matrix(x).copy()
        assert not np.isfinite(product[5]).any()
        others = np.arange(40) != 5
        assert np.array_equal(product[others], expected[others])


def _pieces(x: Floats) -> Floats:
    """``[tokens, inputs]`` → ``[pieces, tokens, inputs]``."""
    kernel = llvm_amx.compiled()
    assert kernel is not None
    blocks, steps = -(-len(x) // ROWS), x.shape[1] // INPUTS
    shape = (blocks, steps, PIECES, ROWS, INPUTS)
    memory = aligned(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
    arguments = (x.ctypes.data, memory.ctypes.data, len(x), steps, x.shape[1])
    run_shared(kernel.split, *arguments, parts=blocks, is_shared=False)
    pieces = memory.transpose(2, 0, 3, 1, 4).reshape(PIECES, blocks * ROWS, steps * INPUTS)
    floats: Floats = (pieces[:, : len(x)].astype(np.uint32) << 16).view(np.float32)
    return floats
