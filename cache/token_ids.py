"""Token ids as C integers, so that slices are copied, compared and hashed as memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Signed 64-bit integers.
TYPE = "q"


def ids_of(tokens: Sequence[int]) -> array[int]:
    """Tokens as an array of C integers; such an array is returned unchanged."""
    return tokens if isinstance(tokens, array) else array(TYPE, tokens)


def common(first: array[int], second: array[int]) -> int:
    """The length of the common prefix of two arrays."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
