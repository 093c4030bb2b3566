"""The queue of waiting sequences, in the order of their turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from sortedcontainers import SortedKeyList

from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import Sibling, SiblingFollowers


class Queue:
    """Waiting sequences by turn, which changes at most when a blocked one becomes ready.

    Adding and removing cost the logarithm of the queue's length. A sequence is blocked while its
    prefix is read from disk or computed by a sibling, and returns to its place afterwards. A new
    one is blocked until ``unblock_ready``: all ranks call it in the same state, so that their
    turns are the same.

    Args:
        fetching: returns whether background work still loads a sequence's prefix, state or
            grammar.
        slack: returns a sequence's ``slack``. It is asked whenever the sequence becomes ready,
            because more of its prefix may then be cached.
    """

    def __init__(
        self, fetching: Callable[[Sequence], bool], slack: Callable[[Sequence], float]
    ) -> None:
        self._fetching = fetching
        self._slack = slack
        self._ready: SortedKeyList[Sequence, tuple[float, int, int]] = cast(
            "SortedKeyList[Sequence, tuple[float, int, int]]", SortedKeyList(key=_turn)
        )
        self._blocked: dict[Sequence, None] = {}
        self._followers = SiblingFollowers()
        self._choices = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._blocked) + len(self._followers)

    def __iter__(self) -> Iterator[Sequence]:
        if not (self._blocked or self._followers):
            return iter(list(self._ready))
        return iter(sorted((*self._ready, *self._blocked, *self._followers), key=_turn))

    def __contains__(self, sequence: Sequence) -> bool:
        blocked = sequence in self._blocked or sequence in self._followers
        return blocked or sequence in self._ready

    @property
    def choices(self) -> int:
        """The number of choices that all waiting sequences stand for."""
        return self._choices

    @property
    def ready(self) -> Iterator[Sequence]:
        """Sequences that may begin, by turn. Do not change the queue while iterating."""
        return iter(self._ready)

    @property
    def idle(self) -> bool:
        """Whether no sequence could begin: all of them are blocked by background work."""
        begins = self._ready or self._followers
        return not begins and all(map(self._fetching, self._blocked))

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, which ``unblock_ready`` puts in its place."""
        self._choices += sequence.num_choices
        self._blocked[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which must be in the queue."""
        if sequence in self._blocked:
            del self._blocked[sequence]
        elif sequence in self._followers:
            self._followers.remove(sequence)
        else:
            self._ready.remove(sequence)
        self._choices -= sequence.num_choices

    def block(self, sequence: Sequence) -> None:
        """Blocks a sequence, because its swapped state has gone to disk."""
        if sequence not in self._blocked:
            self._ready.remove(sequence)
            self._blocked[sequence] = None

    def set_behind(self, sequence: Sequence, sibling: Sibling) -> None:
        """Blocks a ready sequence until a sibling has computed the prefix that both share."""
        self._ready.remove(sequence)
        self._followers.add(sequence, sibling)

    def unblock_ready(self) -> None:
        """Puts new sequences, and others that need not wait any longer, in their places."""
        for sequence in [s for s in self._blocked if not self._fetching(s)]:
            del self._blocked[sequence]
            self._make_ready(sequence)
        for sequence in self._followers.take_ready():
            self._make_ready(sequence)

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between two calls."""
        self._followers.check_integrity()
        ready = list(self._ready)
        everyone = {*ready, *self._blocked, *self._followers}
        assert len(everyone) == len(self)
        assert self._choices == sum(len(s.choices) for s in everyone)
        assert ready == sorted(ready, key=_turn)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.slack = self._slack(sequence)
        self._ready.add(sequence)


def _turn(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.turn
