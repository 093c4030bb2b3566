"""Prompts with a common prefix: the later one waits until the earlier one has computed it.

It then takes the prefix from the prefix cache, so that no prefix is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from chairlift.cache.token_ids import common
from chairlift.scheduler.sequence import Sequence

# A prompt waits for a sibling if that saves computing at least this many tokens.
MIN_SHARED = 32


class Sibling(NamedTuple):
    """A prompt being computed whose first ``shared`` tokens a waiting sequence begins with too."""

    sequence: Sequence
    shared: int

    @property
    def computing(self) -> bool:
        """Whether the sibling is still computing the shared tokens."""
        sequence = self.sequence
        return not sequence.finished and 0 < sequence.computed < self.shared


def sibling_of(sequence: Sequence, cached: int, prompts: Iterable[Sequence]) -> Sibling | None:
    """The sibling to wait for: the one of ``prompts`` that shares the most tokens to compute.

    Only prompts whose turn is earlier count, so that a request never waits for one that others may
    pass.

    Args:
        sequence: the waiting sequence.
        cached: its tokens that the prefix cache has already.
        prompts: the prompts that are being computed.

    Returns:
        The sibling; None if waiting is not worth it.
    """
    best = None
    for other in prompts:
        if (
            other.cache_salt != sequence.cache_salt
            or other.bypasses_prefix_cache
            or other.turn > sequence.turn
        ):
            continue
        required = slice(cached, cached + MIN_SHARED)
        if len(sequence.ids) < required.stop or sequence.ids[required] != other.ids[required]:
            continue  # the cheap check first: most prompts have nothing in common
        shared = common(sequence.ids, other.ids)
        if other.computed < shared >= required.stop and (best is None or shared > best.shared):
            best = Sibling(other, shared)
    return best


class SiblingFollowers:
    """Sequences that wait for a sibling, and the sibling of each."""

    def __init__(self) -> None:
        self._siblings: dict[Sequence, Sibling] = {}
        # For each sibling a heap of its followers, the fewest shared tokens first. Removed
        # followers stay in the heap until they come up.
        self._behind: dict[Sequence, list[tuple[int, tuple[float, int, int], Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._siblings)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._siblings)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._siblings

    def add(self, sequence: Sequence, sibling: Sibling) -> None:
        """Adds a sequence that waits until its sibling has computed the shared prefix or ended."""
        self._siblings[sequence] = sibling
        heap = self._behind.setdefault(sibling.sequence, [])
        heappush(heap, (sibling.shared, sequence.turn, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which must be a follower."""
        del self._siblings[sequence]

    def take_ready(self) -> list[Sequence]:
        """Removes and returns the sequences that need not wait any longer."""
        ready = []
        for other, heap in list(self._behind.items()):
            while heap and not Sibling(other, heap[0][0]).computing:
                sequence = heappop(heap)[2]
                sibling = self._siblings.get(sequence)
                if sibling is not None and sibling.sequence is other:
                    del self._siblings[sequence]
                    ready.append(sequence)
            if not heap:
                del self._behind[other]
        return ready

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between two calls."""
        queued = {sequence for heap in self._behind.values() for _, _, sequence in heap}
        assert set(self._siblings) <= queued
        assert set(self._behind) >= {sibling.sequence for sibling in self._siblings.values()}
