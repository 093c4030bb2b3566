"""How memory is divided into pages, and how many pages a sequence takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.pages.budget import PROMPTS, UNUSED_PAGES, PageBudget, touched
from chairlift.cache.pages.page import PAGE_TOKENS, step_size, step_size_below

WINDOWS = st.dictionaries(st.integers(1, 3000), st.integers(1, 500), max_size=3)


def _touched(begin: int, end: int) -> int:
    return len({position // PAGE_TOKENS for position in range(begin, end)})


@given(tokens=st.integers(1, 400), window=st.integers(1, 200), step=st.integers(1, 150))
def test_a_sequence_never_touches_more_pages_than_it_counts(
    tokens: int, window: int, step: int
) -> None:
    budget = PageBudget({None: 9, window: 9})
    full, in_window = budget.pages_of(tokens, step)
    assert full == _touched(0, tokens)
    begins = range(max(0, tokens - step + 1))
    spans = [(max(0, begin - (window - 1)), min(begin + step, tokens)) for begin in begins]
    spans += [(max(0, tokens - (window - 1) - step), tokens)]
    assert max(_touched(*span) for span in spans) <= in_window <= full


@given(tokens=st.integers(1, 300))
def test_the_bound_is_reached(tokens: int) -> None:
    assert touched(tokens) == max(_touched(b, b + tokens) for b in range(PAGE_TOKENS))


@given(
    kv_bytes=st.integers(0, 1 << 34),
    full=st.integers(0, 500),
    windows=WINDOWS,
    row_bytes=st.sampled_from([0, 70_000]),
    rows=st.integers(1, 300),
    step=st.integers(2, 2000),
)
def test_all_memory_is_divided_and_no_window_gets_more_than_it_needs(
    kv_bytes: int, full: int, windows: dict[int, int], row_bytes: int, rows: int, step: int
) -> None:
    geometry = KVGeometry(full, windows, row_bytes)
    budget = PageBudget.divided(kv_bytes, geometry, rows, step)
    sizes = {window: PAGE_TOKENS * size for window, size in windows.items()}
    if full:
        sizes[None] = PAGE_TOKENS * full
    assert budget.pages.keys() == sizes.keys()
    states = (budget.states or 0) * row_bytes
    used = states + sum(count * sizes[window] for window, count in budget.pages.items())
    if states > kv_bytes or not sizes:
        assert not any(budget.pages.values())
        return
    assert used <= kv_bytes
    assert kv_bytes - used < max(sizes.values()), "what is left holds no page"
    equal = (kv_bytes - states) // sum(sizes.values())
    for window, count in budget.pages.items():
        assert count >= min(equal, 1 << 30) or count == _room(window, rows, step)
        if window is not None and full:
            assert count <= _room(window, rows, step)


def _room(window: int | None, rows: int, step: int) -> int:
    """The pages that all rows and a few prompts may touch in a window."""
    assert window is not None
    prompt = max(_touched(b, b + window - 1 + step) for b in (0, 1, PAGE_TOKENS - 1))
    row = max(_touched(b, b + window) for b in (0, 1, PAGE_TOKENS - 1))
    return rows * row + PROMPTS * prompt + UNUSED_PAGES


def test_a_kind_alone_gets_everything() -> None:
    only_window = PageBudget.divided(1_000_000, KVGeometry(0, {32: 100}), 4, 24)
    only_full = PageBudget.divided(1_000_000, KVGeometry(100), 4, 24)
    assert (only_window.pages, only_full.pages) == ({32: 156}, {None: 156})
    assert only_full.usable == (155,)
    assert PageBudget.divided(1_000_000, KVGeometry(0, {}, 100), 4, 24) == PageBudget({}, 8)


@given(st.integers(0, 20_000))
def test_steps_are_padded_to_recurring_sizes(tokens: int) -> None:
    """By at most seven tokens, or less than a quarter."""
    size, below = step_size(tokens), step_size_below(tokens)
    assert below <= tokens <= size < tokens + max(8, tokens / 4)
    assert (step_size(size), step_size(below)) == (size, below)
    assert size == tokens or size % 8 == 0
    assert size in (below, step_size(below + 1))


def test_there_are_few_sizes_of_steps() -> None:
    assert len({step_size(tokens) for tokens in range(1, 257)}) == 23
    assert len({step_size(tokens) for tokens in range(257, 4097)}) == 16
