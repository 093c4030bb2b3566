"""Settings of the supervision: when an engine process counts as hung, and how it is restarted."""

from __future__ import annotations

from dataclasses import dataclass

# An engine that has served for so many seconds was well, and no delay saves anything.
STEADY_SECONDS = 10.0
# A restart may take so many times what the first start took, whose files were perhaps in memory.
START_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Supervision:
    """
    ``timeout`` is how many seconds an engine that has work may go without ending a step. A step
    takes milliseconds to seconds: the longest known, a whole chunk of a prompt on two CPU cores,
    takes 3, and kernels that are compiled in their first use some tens. Two minutes are far from
    either, and still shorter than what most clients wait for.

    ``attempts`` is how many starts in a row may fail. Between two of them, and before an engine is
    started again that has not served for a while, ``backoff`` seconds pass, twice as many each
    time, and at most ``longest_backoff``.
    """

    timeout: float = 120.0
    attempts: int = 5
    backoff: float = 0.5
    longest_backoff: float = 30.0

    def delay(self, early: int) -> float:
        """Seconds before the next start, when so many engines in a row have ended early."""
        return min(self.longest_backoff, self.backoff * 2 ** (early - 1)) if early else 0.0

    def start_limit(self, first: float | None) -> float | None:
        """Seconds that a start may take when the first one took ``first``; None: as long as it
        likes, since nobody knows how long a model takes to load.
        """
        return None if first is None else self.timeout + START_FACTOR * first
