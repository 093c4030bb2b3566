"""The upload of a step's numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from chairlift.cache.pages.upload import Upload, uploaded

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1)


def _numbers(shapes: Shapes, seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 1 << 30, shape, np.int32) for shape in shapes]


def _lists(arrays: list[mx.array]) -> list[object]:
    return [array.tolist() for array in arrays]


@given(SHAPES)
def test_a_graph_takes_the_numbers_that_come_after_it(shapes: Shapes) -> None:
    upload = Upload(_numbers(shapes, 0))
    results = [array // 2 for array in upload.arrays]
    later = _numbers(shapes, 1)
    assert upload.refill(later)
    assert _lists(results) == [(part // 2).tolist() for part in later]
    assert _lists(list(uploaded(later))) == [part.tolist() for part in later]


@given(SHAPES, SHAPES)
def test_numbers_of_other_shapes_change_nothing(shapes: Shapes, others: Shapes) -> None:
    upload = Upload(_numbers(shapes, 0))
    assert upload.refill(_numbers(others, 1)) == (others == shapes)
    expected = _numbers(shapes, 1 if others == shapes else 0)
    assert _lists(upload.arrays) == [part.tolist() for part in expected]
