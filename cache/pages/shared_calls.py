"""Which prompts of a step share a call of a layer that is called part by part."""

from __future__ import annotations

from collections.abc import Sequence

# A call costs about as much as computing so many tokens of padding: a GPU's host launches some
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
    order = sorted(range(len(counts)), key=lambda number: counts[number])
    # Of the prompts up to each, in the order of their lengths: the least cost, and where the last
    # call begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(order) + 1):
        longest = counts[order[stop - 1]]
        options = (
            (best[start][0] + longest * (stop - start) + CALL_TOKENS, start)
            for start in range(stop)
        )
        best.append(min(options))
    calls = []
    stop = len(order)
    while stop:
        start = best[stop][1]
        calls.append(sorted(order[start:stop]))
        stop = start
    return sorted(calls)
