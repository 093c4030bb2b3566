"""Limits on the calls of one reply: their number, and how often one call may be repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.api.text.choice import CallDelta


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The maximum number of calls in one reply, and of calls with equal name and arguments."""

    calls: int
    same: int


class LimitedCalls:
    """Passes on the deltas of a reply's calls, up to the first call that exceeds the limits.

    The deltas of a call are buffered while the call may still become one repetition too many.

    Attributes:
        count: the number of calls passed on.
        exceeded: whether a call was dropped; everything after it is dropped, too.
    """

    def __init__(self, limits: CallLimits) -> None:
        self.count = 0
        self.exceeded = False
        self._limits = limits
        # The number of calls by name and arguments.
        self._call_counts: Counter[tuple[str, str]] = Counter()
        self._name: str | None = None
        self._parts: list[str] = []
        self._chars = 0
        # Arguments that were used too often already and begin with this call's text so far.
        self._exhausted: list[str] = []
        self._buffered: list[CallDelta] = []

    @property
    def full(self) -> bool:
        """Whether no further call may begin."""
        return self.count >= self._limits.calls

    def add(self, deltas: Iterable[CallDelta]) -> list[CallDelta]:
        """Takes the next deltas and returns those that can be passed on now."""
        passed: list[CallDelta] = []
        for delta in deltas:
            if delta.opening is not None:
                passed += self.rest()
                self._begin(delta.opening.name)
            if self.exceeded:
                break
            passed += self._take(delta)
        return passed

    def rest(self) -> list[CallDelta]:
        """Ends the current call, and returns its buffered deltas."""
        if self._name is not None:
            self._call_counts[self._name, "".join(self._parts)] += 1
            self._name = None
        return self._release()

    def _begin(self, name: str) -> None:
        self.exceeded = self.exceeded or self.full
        self._name, self._parts, self._chars = name, [], 0
        self._exhausted = [
            arguments
            for (called, arguments), times in self._call_counts.items()
            if called == name and times >= self._limits.same
        ]

    def _take(self, delta: CallDelta) -> list[CallDelta]:
        text = delta.arguments
        self._exhausted = [a for a in self._exhausted if a.startswith(text, self._chars)]
        self._parts.append(text)
        self._chars += len(text)
        self._buffered.append(delta)
        if any(len(arguments) == self._chars for arguments in self._exhausted):
            self.exceeded = True
            self._buffered, self._name = [], None
        return [] if self._exhausted else self._release()

    def _release(self) -> list[CallDelta]:
        released, self._buffered = self._buffered, []
        self.count += sum(delta.opening is not None for delta in released)
        return released
