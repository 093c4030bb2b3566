"""The upload of a step's numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from chairlift.cache.pages.upload import BUFFERS, HostBuffers, Upload, uploaded, uploaded_words

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1)


def _numbers(shapes: Shapes, seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 1 << 30, shape, np.int32) for shape in shapes]


def _lists(arrays: list[mx.array]) -> list[object]:
    return [array.tolist() for array in arrays]


@given(SHAPES)
def test_a_graph_takes_the_numbers_that_come_after_it(shapes: Shapes) -> None:
    upload = Upload(_numbers(shapes, 0), HostBuffers())
    results = [array // 2 for array in upload.arrays]
    later = _numbers(shapes, 1)
    assert upload.refill(later)
    assert _lists(results) == [(part // 2).tolist() for part in later]
    assert _lists(list(uploaded(later, HostBuffers()))) == [part.tolist() for part in later]


@given(SHAPES, SHAPES)
def test_numbers_of_other_shapes_change_nothing(shapes: Shapes, others: Shapes) -> None:
    upload = Upload(_numbers(shapes, 0), HostBuffers())
    assert upload.refill(_numbers(others, 1)) == (others == shapes)
    expected = _numbers(shapes, 1 if others == shapes else 0)
    assert _lists(upload.arrays) == [part.tolist() for part in expected]


@given(st.lists(st.tuples(st.sampled_from([3, 1 << 14, 1 << 15]), st.booleans()), max_size=30))
def test_no_buffer_changes_before_it_is_copied(uploads: list[tuple[int, bool]]) -> None:
    """Some are evaluated later than others, and some never."""
    places: list[int] = []
    buffers = HostBuffers(lambda numbers: places.append(len(numbers)))
    results = []
    for number, (size, needed) in enumerate(uploads):
        numbers = np.full(size, number, np.int32)
        numbers[-1] = -number
        upload = Upload([numbers[:-1], numbers[-1:]], buffers)
        if needed:
            results.append((numbers, upload.arrays))
            if number % 2:
                mx.async_eval(upload.arrays)
        else:
            upload.drop()
    for numbers, arrays in results:
        assert np.array_equal(np.concatenate(arrays), numbers)
    assert all(places.count(size) <= BUFFERS for size in places)


def test_a_recurring_size_has_a_few_buffers() -> None:
    sizes: list[int] = []
    buffers = HostBuffers(lambda numbers: sizes.append(len(numbers)))
    for number in range(3 * BUFFERS):
        (array,) = uploaded([np.full(20_000, number, np.int32)], buffers)
        assert array[-1].item() == number
    assert sizes == [1 << 15] * BUFFERS


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=9))
def test_words_keep_all_of_their_bits(numbers: list[int]) -> None:
    words = np.array(numbers, np.uint32)
    copied = uploaded_words(words, HostBuffers())
    assert copied.dtype == mx.uint32
    assert copied.tolist() == numbers
