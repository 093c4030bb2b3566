"""Bounds on the calls of one reply: how many there are, and how often the same one is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.api.text.choice import CallDelta


@dataclass(frozen=True, slots=True)
class CallLimits:
    """``calls``: how many calls one reply may hold.

    ``same``: how many of them may be the same call, with the same name and the same arguments.
    """

    calls: int
    same: int


class LimitedCalls:
    """Passes on the deltas of a reply's calls up to the first call that is beyond the limits.

    A call that may turn out to be one too many of the same is held back until it differs.
    ``count`` is how many calls were passed on. ``exceeded``: a call was dropped, and with it
    everything after it.
    """

    def __init__(self, limits: CallLimits) -> None:
        self.count = 0
        self.exceeded = False
        self._limits = limits
        # By name and arguments, how often each call was made.
        self._made: Counter[tuple[str, str]] = Counter()
        self._name: str | None = None
        self._parts: list[str] = []
        self._chars = 0
        # Arguments that this call must not have, as far as it could still come to have them.
        self._exhausted: list[str] = []
        self._held: list[CallDelta] = []

    @property
    def full(self) -> bool:
        """Whether no further call may begin."""
        return self.count >= self._limits.calls

    def add(self, deltas: Iterable[CallDelta]) -> list[CallDelta]:
        """Takes the next deltas; returns those that may be passed on."""
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
        """The call has ended, or the reply; returns what was held back."""
        if self._name is not None:
            self._made[self._name, "".join(self._parts)] += 1
            self._name = None
        return self._release()

    def _begin(self, name: str) -> None:
        self.exceeded = self.exceeded or self.full
        self._name, self._parts, self._chars = name, [], 0
        self._exhausted = [
            arguments
            for (made, arguments), times in self._made.items()
            if made == name and times >= self._limits.same
        ]

    def _take(self, delta: CallDelta) -> list[CallDelta]:
        text = delta.arguments
        self._exhausted = [a for a in self._exhausted if a.startswith(text, self._chars)]
        self._parts.append(text)
        self._chars += len(text)
        self._held.append(delta)
        if any(len(arguments) == self._chars for arguments in self._exhausted):
            self.exceeded = True
            self._held, self._name = [], None
        return [] if self._exhausted else self._release()

    def _release(self) -> list[CallDelta]:
        released, self._held = self._held, []
        self.count += sum(delta.opening is not None for delta in released)
        return released
