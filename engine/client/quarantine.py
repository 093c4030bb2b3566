"""Who may be in the engine after it has crashed, so that who brings it down is found alone.

A crash proves nothing: most are nobody's fault, and whoever was being computed goes on together.
A request that gets past the place where it was is cleared. One that was being computed in a second
crash before it did so is a suspect. While there are suspects they are computed one at a time with
nobody beside them, those first that had begun last, each until it is cleared or ends. Who is alone
in the engine when it dies, not for the first time, is guilty. That explains the crashes before, so
that the others go on together.

An engine may also be killed from outside, by an operator or for want of memory, and that may happen
to hit a suspect in its trial. So after such an end it has to be alone in a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Output tokens behind the place of a crash at which it would have come again: one token is being
# computed and one on its way while the last that arrived is the place, and some slack.
CLEARED_TOKENS = 8
# Crashes that make a suspect.
SUSPICIOUS = 2


class Suspect(Protocol):
    """A request, as far as it matters here."""

    @property
    def progress(self) -> dict[int, int]:
        """Output tokens of each choice that still runs."""
        ...


@dataclass(slots=True)
class _Record:
    """In how many crashes a request was being computed, in how many of them alone, and its progress
    at the last.
    """

    crashes: int
    alone: int
    progress: dict[int, int]


S = TypeVar("S", bound=Suspect)


class Quarantine(Generic[S]):
    """The requests that crashes have thrown a shadow on."""

    def __init__(self) -> None:
        self._records: dict[S, _Record] = {}

    @property
    def active(self) -> bool:
        """Whether there is anybody to watch."""
        return bool(self._records)

    @property
    def alone(self) -> S | None:
        """Who has to be computed with nobody beside it, if anybody."""
        suspects = [s for s, record in self._records.items() if record.crashes >= SUSPICIOUS]
        # By where they were in the crash: who is tried gets on meanwhile, and keeps its turn.
        return min(suspects, key=lambda s: sum(self._records[s].progress.values()), default=None)

    def admits(self, request: S) -> bool:
        """Whether a request may be in the engine now."""
        alone = self.alone
        return alone is None or alone is request

    def crashed(self, computing: Sequence[S], killed: bool = False) -> S | None:
        """The engine has died while it was computing these; who is guilty of it, if that is clear.

        ``killed``: it may well have been from outside.
        """
        alone = len(computing) == 1
        for request in computing:
            before = self._records.get(request, _Record(0, 0, {}))
            self._records[request] = _Record(
                before.crashes + 1, before.alone + alone, request.progress
            )
        if not alone:
            return None
        (last,) = computing
        record = self._records[last]
        if record.crashes < SUSPICIOUS or (killed and record.alone < SUSPICIOUS):
            return None
        del self._records[last]
        for other in self._records.values():
            other.crashes = 1
        return last

    def tidy(self) -> None:
        """Forgets those that have ended, or got past where they were in their last crash."""
        self._records = {
            request: record
            for request, record in self._records.items()
            if any(
                tokens < record.progress.get(choice, 0) + CLEARED_TOKENS
                for choice, tokens in request.progress.items()
            )
        }
