"""The compiled kernel's products equal NumPy's, for all shapes, strides and numbers of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import compiled_matmul
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix, attention_products
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.worker_threads import shared

pytestmark = pytest.mark.skipif(
    not compiled_matmul.available(), reason="llvmlite is not installed, or not for this CPU"
)


@pytest.fixture(autouse=True)
def _threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_matmul, "MIN_SHARED_WEIGHTS", 1 << 10)
    before = shared.get()
    yield
    shared.set(before)


@given(
    tokens=st.integers(1, 70),
    inputs=st.integers(1, 2200),
    outputs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    narrow=st.booleans(),
    threads=st.integers(1, 4),
    strided=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_products_equal_numpys(
    tokens: int, inputs: int, outputs: list[int], narrow: bool, threads: int, strided: bool
) -> None:
    rng = np.random.default_rng(inputs)
    weights = [mx.array(rng.normal(size=(count, inputs)).astype(np.float32)) for count in outputs]
    if narrow:
        weights = [each.astype(mx.bfloat16).astype(mx.float32) for each in weights]
    x = rng.normal(size=(tokens, 2 * inputs)).astype(np.float32)
    x = x[:, ::2] if strided else np.ascontiguousarray(x[:, :inputs])
    shared.set(threads)
    matrix = CompiledMatrix(weights)
    product = matrix(x).copy()
    exact = np.concatenate([np.array(each) for each in weights]).astype(np.float64).T
    assert np.all(np.abs(product - x @ exact) <= 2.0**-20 * (np.abs(x) @ np.abs(exact)))
    assert np.array_equal(matrix(x[-1:])[0], product[-1])


@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 3),
    queries=st.integers(1, compiled_matmul.MAX_QUERIES),
    blocks=st.integers(1, 4),
    seen=st.integers(1, 80),
    start=st.integers(0, 3),
    threads=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_attention_products_equal_numpys(
    rows: int, heads: int, queries: int, blocks: int, seen: int, start: int, threads: int
) -> None:
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    dim = blocks * kernel.outputs
    rng = np.random.default_rng(seen)
    buffer = rng.normal(size=(rows + 1, heads, seen + 9, dim)).astype(np.float32)
    kv = buffer[1:, :, start : start + seen]
    q = rng.normal(size=(rows, heads, queries, dim)).astype(np.float32)
    shared.set(threads)
    scores = attention_products(q, kv.swapaxes(-1, -2), 0.125)
    assert scores is not None
    exact = 0.125 * q.astype(np.float64) @ kv.swapaxes(-1, -2)
    assert np.allclose(scores, exact, rtol=1e-4, atol=1e-4)
    sums = attention_products(scores, kv)
    assert sums is not None
    assert np.allclose(sums, scores.astype(np.float64) @ kv, rtol=1e-4, atol=1e-3)


def test_shapes_without_a_kernel_are_left_to_the_blas() -> None:
    def products(queries: int, dim: int) -> np.ndarray | None:
        q = np.zeros((1, 1, queries, dim), np.float32)
        return attention_products(q, np.zeros((1, 1, 5, dim), np.float32).swapaxes(-1, -2))

    assert products(1, 64) is not None
    assert products(compiled_matmul.MAX_QUERIES + 1, 64) is None
    assert products(1, 63) is None


def test_callers_at_the_same_time_get_their_own_products() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(200, 300)).astype(np.float32)
    matrix = CompiledMatrix([mx.array(weights)])
    shared.set(3)
    wrong: list[int] = []

    def call(seed: int) -> None:
        x = np.random.default_rng(seed).normal(size=(5, 300)).astype(np.float32)
        same = [np.allclose(matrix(x), x @ weights.T, atol=1e-3) for _ in range(200)]
        if not all(same):
            wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
