"""Decides which requests the engine may run after a crash, to isolate the one that causes it.

One crash proves nothing: most are no request's fault, and all requests resume together. A request
that passes the place where it was is cleared. One that is computed in a second crash before that is
a suspect. Suspects run one at a time without any other request, the one with the least progress
first, each until it is cleared or ends. A suspect that is alone in the engine when it dies is
guilty. That explains the earlier crashes, so the others resume together.

An engine may also be killed from outside, by an operator or for lack of memory, and that may hit a
suspect during its trial. So after such an end, it has to be alone in a second crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Output tokens after the place of a crash at which it would have recurred: one token is being
# computed and one in transit beyond the last that arrived, plus some slack.
CLEARED_TOKENS = 8
# The number of crashes that make a request a suspect.
SUSPICIOUS = 2


class Suspect(Protocol):
    """A request, as the quarantine sees it."""

    @property
    def progress(self) -> dict[int, int]:
        """Output tokens of each choice that still runs."""
        ...


@dataclass(slots=True)
class _Record:
    """The crashes during which a request was computed, those in which it was alone, and its
    progress at the last one.
    """

    crashes: int
    alone: int
    progress: dict[int, int]


S = TypeVar("S", bound=Suspect)


class Quarantine(Generic[S]):
    """The requests that were computed during a crash and are not cleared yet."""

    def __init__(self) -> None:
        self._records: dict[S, _Record] = {}

    @property
    def active(self) -> bool:
        """Whether any request is watched."""
        return bool(self._records)

    @property
    def alone(self) -> S | None:
        """The suspect that must be computed alone now, if there is one."""
        suspects = [s for s, record in self._records.items() if record.crashes >= SUSPICIOUS]
        # By progress at the crash, which stays fixed, so that the one being tried keeps its turn.
        return min(suspects, key=lambda s: sum(self._records[s].progress.values()), default=None)

    def admits(self, request: S) -> bool:
        """Whether a request may be in the engine now."""
        alone = self.alone
        return alone is None or alone is request

    def crashed(self, computing: Sequence[S], killed: bool = False) -> S | None:
        """Records a crash while these were computed; returns the guilty request if it is certain.

        ``killed``: the process may have been killed from outside.
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
        """Clears requests that have ended or passed their progress at the last crash."""
        self._records = {
            request: record
            for request, record in self._records.items()
            if any(
                tokens < record.progress.get(choice, 0) + CLEARED_TOKENS
                for choice, tokens in request.progress.items()
            )
        }
