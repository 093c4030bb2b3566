"""Decides which prompts of a step share a call of a layer that is called part by part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# A call costs about as much as computing this many tokens of padding: a GPU's host launches some
# hundred operations for it.
CALL_TOKENS = 256


def shared_calls(counts: Sequence[int]) -> list[list[int]]:
    """Divides prompts into calls with the least padding and the fewest calls.

    A call is as long as the longest of its prompts. The result minimizes the tokens of all calls,
    padding included, and ``CALL_TOKENS`` more for each call.

    Args:
        counts: the new tokens of each prompt.

    Returns:
        The numbers of the prompts of each call, in ascending order.
    """
    numbers: dict[int, list[int]] = {}
    for number, count in enumerate(counts):
        numbers.setdefault(count, []).append(number)
    # A step has few different lengths: prompts of n lengths have n * n / 2 tokens at least.
    lengths = sorted(numbers)
    begins = [0, *accumulate(len(numbers[length]) for length in lengths)]
    # Of the prompts up to each length: the least cost, and the first length of the last call.
    best: list[tuple[int, int]] = [(0, 0)]
    for stop, longest in enumerate(lengths, 1):
        options = (
            (best[start][0] + longest * (begins[stop] - begins[start]) + CALL_TOKENS, start)
            for start in range(stop)
        )
        best.append(min(options))
    calls = []
    stop = len(lengths)
    while stop:
        start = best[stop][1]
        calls.append(sorted(n for length in lengths[start:stop] for n in numbers[length]))
        stop = start
    return sorted(calls)
