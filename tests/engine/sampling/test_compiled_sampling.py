"""Compiled functions for sampling compute what NumPy and MLX compute."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cpu.compiled import compiled_sampling
from chairlift.engine.cpu.compiled.llvm.sampling.choice import PARTS, SMALLEST

pytestmark = pytest.mark.skipif(
    not compiled_sampling.available(), reason="there are no compiled functions for this CPU"
)
ROWS = 5
_VOCABULARIES = st.integers(1, 300) | st.sampled_from([1024, 4097, 50257])


def _lines(seed: int, numbers: int, scale: float = 3.0) -> np.ndarray:
    lines = np.random.default_rng(seed).normal(0, scale, (ROWS, numbers))
    # Many numbers tie, as with logits of 16 bits.
    return (np.round(lines * 8) / 8).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), numbers=_VOCABULARIES, broken=st.booleans())
def test_the_first_highest_number(seed: int, numbers: int, broken: bool) -> None:
    lines, rows = _lines(seed, numbers), np.array([3, 0, 2])
    lines[0] = -np.inf
    if broken:
        lines[3, seed % numbers] = np.nan
        lines[2, seed % numbers] = np.inf
    places, values = compiled_sampling.highest(lines, rows)
    assert np.array_equal(values, lines[rows].max(axis=1), equal_nan=True)
    assert places.tolist()[broken:] == lines[rows].argmax(axis=1).tolist()[broken:]
    assert 0 <= places.min() <= places.max() < numbers


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), numbers=_VOCABULARIES)
def test_a_mask_rules_out_the_numbers_without_a_bit(seed: int, numbers: int) -> None:
    lines = _lines(seed, numbers)
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (ROWS, -(-numbers // 32)))
    bits = words.astype(np.int32)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :numbers]
    expected = np.where(allowed, lines, -np.inf)
    guard = np.full((ROWS + 1, numbers), 7.0, np.float32)
    compiled_sampling.mask(lines, bits, into=guard[:ROWS])
    assert np.array_equal(guard[:ROWS], expected)
    assert np.all(guard[ROWS] == 7)
    compiled_sampling.mask(lines, bits, into=lines)
    assert np.array_equal(lines, expected)


@pytest.mark.parametrize("shape", [(ROWS - 1, 4), (ROWS, 3), (ROWS, 5)])
def test_a_mask_of_another_size_is_refused(shape: tuple[int, int]) -> None:
    """The kernel would read memory behind it."""
    lines = _lines(0, 100)
    with pytest.raises(AssertionError):
        compiled_sampling.mask(lines, np.zeros(shape, np.int32), into=lines)
    with pytest.raises(AssertionError):
        compiled_sampling.mask(lines, np.zeros((ROWS, 4), np.int32), into=lines[1:])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    numbers=_VOCABULARIES,
    rates=st.lists(st.sampled_from([1e-30, 0.5, 1.0, 3.0, 1e5]), min_size=3, max_size=3),
    least=st.floats(0, 1),
)
def test_weights_and_their_sums(seed: int, numbers: int, rates: list[float], least: float) -> None:
    lines, rows = _lines(seed, numbers), np.array([4, 1, 2])
    lines[1, 1:] = -np.inf
    highest = lines[rows].max(axis=1)
    columns = np.array(rates, np.float32)
    weights = compiled_sampling.Weights(lines, rows, highest, columns)
    expected = np.exp((lines[rows] - highest[:, None]) * columns[:, None])
    expected[expected < SMALLEST] = 0
    sums = weights.part_sums(np.full(3, least, np.float32))
    length = compiled_sampling.part_length(numbers)
    for row in range(3):
        own = np.full(numbers + 1, 7.0, np.float32)
        weights.weigh(row, own[:numbers])
        assert own[numbers] == 7
        np.testing.assert_allclose(own[:numbers], expected[row], rtol=1e-5, atol=1e-12)
        kept = np.where(own[:numbers] >= np.float32(least), own[:numbers], 0).astype(np.float64)
        parts = [kept[part * length : (part + 1) * length].sum() for part in range(PARTS)]
        assert sums[row] == pytest.approx(parts, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2), min_size=1, max_size=4),
    count=st.integers(1, 300),
)
def test_random_numbers_are_those_of_mlx(keys: list[tuple[int, int]], count: int) -> None:
    array = np.array(keys, np.uint32)
    expected = [np.array(mx.random.uniform(shape=(count,), key=mx.array(key))) for key in array]
    assert np.array_equal(compiled_sampling.uniform_numbers(array, count), np.stack(expected))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), numbers=_VOCABULARIES, least=st.sampled_from([0.0, 0.01, 1.0]))
def test_the_first_of_a_race_wins(seed: int, numbers: int, least: float) -> None:
    lines, rows = _lines(seed, numbers), np.array([4, 1, 2])
    lines[1, 1:] = -np.inf
    highest, ones = lines[rows].max(axis=1), np.ones(3, np.float32)
    length = compiled_sampling.part_length(numbers)
    parts = np.random.default_rng(seed).integers(0, PARTS, 3)
    keys = np.random.default_rng(seed).integers(0, 2**32, (3, 2)).astype(np.uint32)
    uniform = compiled_sampling.uniform_numbers(keys, 1 + length)
    weights = compiled_sampling.Weights(lines, rows, highest, ones)
    winners = weights.race(np.full(3, least, np.float32), parts, uniform)
    for row, winner in enumerate(winners.tolist()):
        first = int(parts[row]) * length
        own = np.exp(lines[rows[row], first : first + length] - highest[row])
        own[(own < least * (1 - 1e-6)) | (own < SMALLEST)] = 0
        speeds = own / np.maximum(-np.log1p(-uniform[row, 1 : 1 + len(own)]), 1e-10)
        if not own.any():
            assert winner == -1
        else:
            assert speeds[winner - first] == pytest.approx(speeds.max(), rel=1e-5)


def test_times_are_exact_for_the_smallest_and_largest_random_numbers() -> None:
    """A race is decided by its shortest times, those of random numbers near 0."""
    uniform = np.concatenate(
        [2.0 ** -np.arange(1, 33), 1 - 2.0 ** -np.arange(1, 25), np.linspace(0, 0.999, 500)]
    ).astype(np.float32)
    # Two tokens race: the second one's weight is chosen so that it wins by a hair, or loses.
    for number in uniform.tolist():
        time = max(-np.log1p(-np.float64(np.float32(number))), 1e-10)
        for ratio, winner in ((1 - 4e-6, 0), (1 + 4e-6, 1)):
            other = np.float32(0.5)
            logits = np.array([[0.0, np.log(-np.log1p(-np.float64(other)) / time * ratio)]])
            numbers = np.full((1, 32), -np.inf, np.float32)
            numbers[0, :2] = logits
            highest = numbers.max(axis=1)
            if abs(logits[0, 1]) > 40:
                continue
            weights = compiled_sampling.Weights(
                numbers, np.zeros(1, np.int64), highest, np.ones(1, np.float32)
            )
            draws = np.array([[0.0, number, other]], np.float32)
            zero = np.zeros(1, np.float32)
            assert weights.race(zero, np.zeros(1, np.int64), draws).tolist() == [winner]
