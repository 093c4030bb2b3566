"""Attention by row equals exact attention, for any numbers of tokens, heads and columns."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import compiled_matmul, row_attention
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.row_attention.kernel import MAX_QUERIES
from chairlift.engine.cpu.compiled.worker_threads import shared
from chairlift.engine.cpu.gemm import Floats

pytestmark = pytest.mark.skipif(
    not compiled_matmul.available(), reason="llvmlite is not installed, or not for this CPU"
)


@pytest.fixture(autouse=True)
def _threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(row_attention, "MIN_SHARED", 1 << 10)
    before = shared.get()
    yield
    shared.set(before)


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2500)), min_size=1, max_size=5),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    blocks=st.integers(1, 3),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    threads=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_each_token_attends_to_its_own_row_up_to_itself(
    rows: list[tuple[int, int]],
    key_heads: int,
    group: int,
    blocks: int,
    spread: float,
    threads: int,
) -> None:
    counts, begun = [1 + rows[0][0], *(n for n, _ in rows[1:])], [n for _, n in rows]
    queries, keys, values = _random(counts, begun, key_heads, group, blocks, spread)
    shared.set(threads)
    result = row_attention.attend(queries, keys, values, counts, begun, 0.125)
    exact = _exact(queries, keys, values, counts, begun, 0.125)
    assert np.allclose(result, exact, rtol=1e-4, atol=2e-5 * max(1.0, spread))
    half = [buffer.astype(np.float16) for buffer in (keys, values)]
    whole = [buffer.astype(np.float32) for buffer in half]
    from_half, from_whole = (
        row_attention.attend(queries, *stored, counts, begun, 0.125) for stored in (half, whole)
    )
    assert np.array_equal(from_half, from_whole), "float16 is read as it is"


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 2500), st.integers(0, 400)),
        min_size=1,
        max_size=4,
    ),
    group=st.integers(1, 5),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 1.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_columns_begin_anywhere_in_the_buffer_and_wrap(
    rows: list[tuple[int, int, int]],
    group: int,
    spread: float,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    counts, begun = [n for n, _, _ in rows], [n for _, n, _ in rows]
    queries, keys, values = _random(counts, begun, 2, group, 1, spread)
    sinks = np.linspace(-2, 9, 2 * group, dtype=np.float32) if has_sinks else None
    exact = _exact(queries, keys, values, counts, begun, 0.125, sinks, softcap)
    starts = [start % keys.shape[2] for _, _, start in rows]
    for buffer in (keys, values):
        for row, start in enumerate(starts):
            buffer[row] = np.roll(buffer[row], start, axis=1)
    more = starts, sinks, softcap
    result = row_attention.attend(queries, keys, values, counts, begun, 0.125, *more)
    assert np.allclose(result, exact, rtol=1e-4, atol=2e-5 * max(1.0, spread))


@given(count=st.integers(1, 40), begun=st.integers(0, 2500), group=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_token_does_not_depend_on_those_beside_it(count: int, begun: int, group: int) -> None:
    counts, starts = [count, 3], [begun, 70]
    queries, keys, values = _random(counts, starts, 2, group, 1, 3.0)
    together = row_attention.attend(queries, keys, values, counts, starts, 0.125)
    for token in range(count):
        one = queries[token : token + 1]
        alone = row_attention.attend(one, keys, values, [1, 0], [begun + token, 0], 0.125)
        assert np.array_equal(alone[0], together[token])


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2500)), min_size=1, max_size=4),
    heads=st.sampled_from([1, 5, MAX_QUERIES, 2 * MAX_QUERIES]),
    widths=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    spread=st.sampled_from([0.1, 3.0]),
    threads=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_values_may_be_a_part_of_the_keys(
    rows: list[tuple[int, int]], heads: int, widths: tuple[int, int], spread: float, threads: int
) -> None:
    """In multi-head latent attention, where all queries share a key head."""
    counts, begun = [n for n, _ in rows], [n for _, n in rows]
    queries, both, _ = _random(counts, begun, 1, heads, sum(widths), spread)
    keys, latents = np.split(both, [both.shape[3] * widths[0] // sum(widths)], axis=3)
    exact = _exact(queries, both, latents, counts, begun, 0.125)
    shared.set(threads)
    stored = row_attention.of_latents(heads, latents, keys, len(rows))
    assert row_attention.supports(queries, *stored)
    result = row_attention.attend(queries, *stored, counts, begun, 0.125)
    assert np.allclose(result, exact, rtol=1e-4, atol=2e-5 * max(1.0, spread))


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2500)), min_size=1, max_size=4),
    blocks=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_values_may_have_another_size(rows: list[tuple[int, int]], blocks: int) -> None:
    counts, begun = [n for n, _ in rows], [n for _, n in rows]
    queries, keys, _ = _random(counts, begun, 2, 3, 2, 1.0)
    _, _, values = _random(counts, begun, 2, 3, blocks, 1.0)
    exact = _exact(queries, keys, values, counts, begun, 0.125)
    result = row_attention.attend(queries, keys, values, counts, begun, 0.125)
    assert np.allclose(result, exact, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("begun", [200, 700])
def test_numbers_that_are_not_finite_stay(broken: float, begun: int) -> None:
    queries, keys, values = _random([2, 2], [begun, 200], 1, 3, 1, 1.0)
    queries[1, 2, 5] = broken
    result = row_attention.attend(queries, keys, values, [2, 2], [begun, 200], 0.125)
    finite = np.isfinite(result).all(axis=2)
    assert not finite[1, 2]
    assert finite.sum() == finite.size - 1


def test_supported_forms() -> None:
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    queries, keys, values = _random([2], [5], 3, 3, 2, 1.0)
    assert row_attention.supports(queries, keys, values)
    assert row_attention.supports(queries, keys.astype(np.float16), values.astype(np.float16))
    assert row_attention.reads_half()
    assert not row_attention.supports(queries[..., 1:], keys[..., 1:], values[..., 1:])
    assert row_attention.supports(queries, keys, values[..., : kernel.outputs])
    assert not row_attention.supports(queries, keys, values[..., : kernel.outputs - 1])
    assert not row_attention.supports(queries, keys[..., : kernel.outputs], values)
    assert not row_attention.supports(queries, keys.astype(np.float16), values)
    assert not row_attention.supports(queries, keys, np.asfortranarray(values))
    assert not row_attention.supports(queries[:, :8], keys, values)
    many = np.repeat(queries, MAX_QUERIES, axis=1)
    assert not row_attention.supports(many, keys, values)


def _random(
    counts: list[int], begun: list[int], key_heads: int, group: int, blocks: int, spread: float
) -> tuple[Floats, Floats, Floats]:
    """Queries, and keys and values; buffers have a further row and further columns, all NaN."""
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    dim = blocks * kernel.outputs
    rng = np.random.default_rng(sum(counts) + sum(begun))
    columns = max(n + old for n, old in zip(counts, begun, strict=True)) + sum(begun) % 3
    queries = spread * rng.normal(size=(sum(counts), key_heads * group, dim)).astype(np.float32)
    keys, values = np.full((2, len(counts) + 1, key_heads, columns, dim), np.nan, np.float32)
    for row, used in enumerate(map(add, counts, begun)):
        for buffer in (keys, values):
            buffer[row, :, :used] = rng.normal(size=(key_heads, used, dim))
    return queries, keys, values


def _exact(
    queries: Floats,
    keys: Floats,
    values: Floats,
    counts: list[int],
    begun: list[int],
    scale: float,
    sinks: Floats | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    result = np.empty((*queries.shape[:2], values.shape[3]))
    group = queries.shape[1] // keys.shape[1]
    token = 0
    for row, (count, old) in enumerate(zip(counts, begun, strict=True)):
        for seen in range(old + 1, old + count + 1):
            for head in range(queries.shape[1]):
                own = row, head // group, slice(0, seen)
                scores = scale * (keys[own].astype(np.float64) @ queries[token, head])
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                others = [] if sinks is None else [float(sinks[head])]
                largest = max(scores.max(), *others) if others else scores.max()
                weights = np.exp(scores - largest)
                total = weights.sum() + sum(np.exp(other - largest) for other in others)
                result[token, head] = weights @ values[own] / total
            token += 1
    return result
