"""Quantiles in buckets, compared with those of the sorted values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.metrics.quantiles import RATIO, Quantiles

# Half a bucket, and a little for rounding.
CLOSE = math.sqrt(RATIO) * 1.0001
SECONDS = st.floats(0, 1e4)


def nearest_rank(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


@given(parts=st.lists(st.lists(SECONDS), min_size=1), shares=st.lists(st.floats(0, 1)))
def test_they_are_those_of_the_values_to_half_a_bucket(
    parts: list[list[float]], shares: list[float]
) -> None:
    together, merged = Quantiles(), Quantiles()
    for part in parts:
        each = Quantiles()
        each.add(part)
        together.add(part)
        merged.update(each)
    values = [value for part in parts for value in part]
    found = together.at(shares)
    assert found == merged.at(shares)
    if not values:
        assert found is None
        return
    assert found is not None
    for share, quantile in zip(shares, found, strict=True):
        exact = max(nearest_rank(values, share), 1e-6)
        assert exact / CLOSE <= quantile <= exact * CLOSE


def test_equal_values_are_counted_each() -> None:
    values = Quantiles()
    values.add([1.0] * 98 + [5.0] * 2)
    assert values.at((0.98, 0.99)) == pytest.approx([1, 5], rel=0.025)


def test_the_memory_does_not_grow_with_the_values() -> None:
    values = Quantiles()
    for step in range(1000):
        values.add([0.001 * (step % 7 + 1)] * 50)
    assert len(values._counts) == 7
