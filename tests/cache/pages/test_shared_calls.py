"""Which prompts share a call: never more tokens and calls than in any other division."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from chairlift.cache.pages.shared_calls import CALL_TOKENS, shared_calls


def cost(counts: Sequence[int], calls: Sequence[Sequence[int]]) -> int:
    return sum(len(call) * max(counts[n] for n in call) + CALL_TOKENS for call in calls)


def divisions(numbers: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide some prompts into calls."""
    if not numbers:
        yield []
        return
    first, *rest = numbers
    for division in divisions(rest):
        yield [[first], *division]
        for at in range(len(division)):
            yield [*division[:at], [first, *division[at]], *division[at + 1 :]]


@given(st.lists(st.integers(1, 2000), max_size=6))
def test_no_division_costs_less(counts: list[int]) -> None:
    calls = shared_calls(counts)
    assert sorted(number for call in calls for number in call) == list(range(len(counts)))
    best = min(cost(counts, division) for division in divisions(list(range(len(counts)))))
    assert cost(counts, calls) == best


def test_prompts_of_similar_lengths_share_a_call() -> None:
    assert shared_calls([]) == []
    assert shared_calls([7]) == [[0]]
    assert shared_calls([100, 90, 2000, 110]) == [[0, 1, 3], [2]]
    assert shared_calls([1000, 1]) == [[0], [1]]
