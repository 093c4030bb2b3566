"""Prompts that begin alike: the later one waits until the earlier one has computed what they share.

It then takes that over from the prefix cache, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from chairlift.cache.token_ids import common
from chairlift.scheduler.sequence import Sequence

# A prompt waits for another that is computed first, if it can save this many tokens by that.
MIN_SHARED = 32


class Sibling(NamedTuple):
    """A prompt under way whose first ``shared`` tokens are also those of one that waits."""

    sequence: Sequence
    shared: int

    @property
    def computing(self) -> bool:
        """Whether some of the shared tokens are yet to be computed, and will be."""
        sequence = self.sequence
        return not sequence.finished and 0 < sequence.computed < self.shared


def sibling_of(sequence: Sequence, cached: int, prompts: Iterable[Sequence]) -> Sibling | None:
    """The prompt of ``prompts`` that is about to compute the most for ``sequence``, of which the
    prefix cache has ``cached`` tokens; None if it is not worth waiting for.

    Only those that are due earlier count: so a request never waits for one that others may pass.
    """
    best = None
    for other in prompts:
        if (
            other.cache_salt != sequence.cache_salt
            or other.bypasses_prefix_cache
            or other.rank > sequence.rank
        ):
            continue
        worth = slice(cached, cached + MIN_SHARED)
        if len(sequence.ids) < worth.stop or sequence.ids[worth] != other.ids[worth]:
            continue  # the cheap question first: most prompts have nothing in common
        shared = common(sequence.ids, other.ids)
        if other.computed < shared >= worth.stop and (best is None or shared > best.shared):
            best = Sibling(other, shared)
    return best


class Followers:
    """Sequences that wait for a sibling, by the one they wait for."""

    def __init__(self) -> None:
        self._siblings: dict[Sequence, Sibling] = {}
        # By sibling, a heap with the least shared tokens first. Removed sequences stay in it.
        self._behind: dict[Sequence, list[tuple[int, tuple[float, int, int], Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._siblings)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._siblings)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._siblings

    def add(self, sequence: Sequence, sibling: Sibling) -> None:
        """Has a sequence wait until its sibling has computed what they share, or has ended."""
        self._siblings[sequence] = sibling
        line = self._behind.setdefault(sibling.sequence, [])
        heappush(line, (sibling.shared, sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, which must be there."""
        del self._siblings[sequence]

    def take_ready(self) -> list[Sequence]:
        """Removes and returns the sequences that need not wait any longer."""
        ready = []
        for other, line in list(self._behind.items()):
            while line and not Sibling(other, line[0][0]).computing:
                sequence = heappop(line)[2]
                own = self._siblings.get(sequence)
                if own is not None and own.sequence is other:
                    del self._siblings[sequence]
                    ready.append(sequence)
            if not line:
                del self._behind[other]
        return ready

    def check_integrity(self) -> None:
        """Asserts what must hold between two calls."""
        there = {sequence for line in self._behind.values() for _, _, sequence in line}
        assert set(self._siblings) <= there
        assert set(self._behind) >= {sibling.sequence for sibling in self._siblings.values()}
