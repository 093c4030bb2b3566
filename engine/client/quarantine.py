"""Decides which requests the engine may run after a crash, to isolate the one that causes it.

One crash proves nothing: most crashes are no request's fault, so all requests resume together. A
request is cleared once it has passed the position at which it was. A request that is computed
during a second crash before it is cleared is a suspect. Suspects run one at a time without any
other request, the one with the least progress first, until each is cleared or has ended. A suspect
that is alone in the engine when it dies is guilty. It explains the earlier crashes, so the others
resume together.

An engine may also be killed from outside, by an operator or for lack of memory, while a suspect
runs alone. So after a kill, a suspect is guilty only after a second crash in which it was alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# A request is cleared this many output tokens after its last token before the crash. The crash
# would have recurred before: at that time one token was in transit and one was being computed.
CLEARED_TOKENS = 8
# The number of crashes that make a request a suspect.
SUSPICIOUS = 2


class Suspect(Protocol):
    """A request, as the quarantine sees it."""

    @property
    def progress(self) -> dict[int, int]:
        """The number of output tokens of each running choice."""
        ...


@dataclass(slots=True)
class _Record:
    """A request's crashes.

    Attributes:
        crashes: the number of crashes during which it was computed.
        alone: those of them in which it was the only request.
        progress: its ``Suspect.progress`` at the last of them.
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
    def suspects(self) -> list[S]:
        """The requests of which each has to be computed alone."""
        return [s for s, record in self._records.items() if record.crashes >= SUSPICIOUS]

    @property
    def alone(self) -> S | None:
        """The suspect that must be computed alone now, if there is one."""
        # Progress at the crash does not change, so the suspect that runs alone keeps its turn.
        progress = {s: sum(self._records[s].progress.values()) for s in self.suspects}
        return min(progress, key=progress.__getitem__, default=None)

    def admits(self, request: S) -> bool:
        """Whether a request may be in the engine now."""
        alone = self.alone
        return alone is None or alone is request

    def crashed(self, computing: Sequence[S], killed: bool = False) -> S | None:
        """Records a crash; returns the guilty request if it is certain.

        Args:
            computing: the requests that were being computed.
            killed: the process may have been killed from outside.
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
