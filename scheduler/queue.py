"""Who waits, in the order in which they are due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from sortedcontainers import SortedKeyList

from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import Followers, Sibling


class Queue:
    """Waiting sequences by rank, which does not change while they wait.

    So nothing is ever sorted anew: adding and removing cost the logarithm of the queue's length,
    and all else what is asked for. Those whose prefix is on its way from disk stand aside, as do
    those whose prefix is being computed for a sibling, and come back to their place once it is
    there.

    Args:
        fetching: whether a sequence's prefix is on its way.
    """

    def __init__(self, fetching: Callable[[Sequence], bool]) -> None:
        self._fetching = fetching
        self._ready: SortedKeyList[Sequence, tuple[float, int, int]] = cast(
            "SortedKeyList[Sequence, tuple[float, int, int]]", SortedKeyList(key=_rank)
        )
        self._aside: dict[Sequence, None] = {}
        self._followers = Followers()
        self._choices = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside) + len(self._followers)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((*self._ready, *self._aside, *self._followers), key=_rank))

    def __contains__(self, sequence: Sequence) -> bool:
        aside = sequence in self._aside or sequence in self._followers
        return aside or sequence in self._ready

    @property
    def choices(self) -> int:
        """Of requests, those that all of them stand for."""
        return self._choices

    @property
    def ready(self) -> Iterator[Sequence]:
        """Those who may begin, first come first; not to be changed meanwhile."""
        return iter(self._ready)

    @property
    def idle(self) -> bool:
        """Whether nobody could begin: all that there are wait for the disk."""
        begins = self._ready or self._followers
        return not begins and all(map(self._fetching, self._aside))

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        self._choices += len(sequence.choices)
        if self._fetching(sequence):
            self._aside[sequence] = None
        else:
            self._ready.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, which must be there."""
        if sequence in self._aside:
            del self._aside[sequence]
        elif sequence in self._followers:
            self._followers.remove(sequence)
        else:
            self._ready.remove(sequence)
        self._choices -= len(sequence.choices)

    def block(self, sequence: Sequence) -> None:
        """What one of those who may begin would begin with has gone to disk."""
        self._ready.remove(sequence)
        self._aside[sequence] = None

    def set_behind(self, sequence: Sequence, sibling: Sibling) -> None:
        """What one of those who may begin would begin with is being computed for another one."""
        self._ready.remove(sequence)
        self._followers.add(sequence, sibling)

    def unblock_ready(self) -> None:
        """Makes ready whose prefix has come, or will not."""
        for sequence in [s for s in self._aside if not self._fetching(s)]:
            del self._aside[sequence]
            self._ready.add(sequence)
        for sequence in self._followers.take_ready():
            self._ready.add(sequence)

    def check_integrity(self) -> None:
        """Asserts what must hold between two calls."""
        self._followers.check_integrity()
        everyone = list(self)
        aside = {*self._aside, *self._followers}
        assert len(aside) == len(self._aside) + len(self._followers)
        assert self._choices == sum(len(s.choices) for s in everyone)
        assert [s for s in everyone if s not in aside] == list(self._ready)


def _rank(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.rank
