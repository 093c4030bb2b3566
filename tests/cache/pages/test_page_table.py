"""The table in which kernels look up pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cache.pages.page import seen_window
from chairlift.cache.pages.page_table import MIN_ENTRIES, PageLists, page_table

# Of each sequence, how many pages a window has left behind, and the numbers of the others.
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 10**6), max_size=60)), max_size=12
)


def lists_of(sequences: list[tuple[int, list[int]]]) -> PageLists:
    starts, pages = [], []
    for left, numbers in sequences:
        starts.append(len(pages) - left)
        pages += numbers
    return PageLists(np.array(starts, np.int32), np.array(pages, np.int32))


@given(st.lists(SEQUENCES, min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 5))
def test_each_sequence_finds_its_pages(
    batches: list[list[tuple[int, list[int]]]], padding: int, more: int
) -> None:
    """Padding, and lines without sequences, find page 0."""
    lists = PageLists.joined([*map(lists_of, batches), PageLists.empty(padding)])
    sequences = [sequence for batch in batches for sequence in batch]
    lines = len(sequences) + padding
    table = page_table(lists, lines + more)
    for line, (left, numbers) in enumerate(sequences):
        found = [int(table[table[line] + left + i]) for i in range(len(numbers))]
        assert found == numbers
    assert not table[table[len(sequences) : lines + more]].any()


@given(st.integers(1, 400), st.integers(0, 60_000))
def test_the_size_depends_on_all_pages_together(lines: int, pages: int) -> None:
    lists = PageLists(np.zeros(lines, np.int32), np.ones(pages, np.int32))
    size = len(page_table(lists, lines))
    assert size == MIN_ENTRIES or size / 4 < lines + 1 + pages <= size


@pytest.mark.parametrize(
    ("wanted", "kept", "seen"), [(None, None, None), (None, 8, 8), (5, None, 5), (5, 8, 5)]
)
def test_a_layer_sees_the_smaller_window(
    wanted: int | None, kept: int | None, seen: int | None
) -> None:
    assert seen_window(wanted, kept) == seen


def test_a_mask_wider_than_the_window_that_is_kept() -> None:
    with pytest.raises(ValueError, match="a mask of 9 tokens over the pages of a window of 8"):
        seen_window(9, 8)
