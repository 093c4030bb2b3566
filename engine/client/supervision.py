"""The settings of supervision: when an engine process counts as hung, and how it is restarted."""

from __future__ import annotations

from dataclasses import dataclass

# An engine that has served for this long was working, so the next one starts without a delay.
STEADY_SECONDS = 10.0
# A restart may take this many times as long as the first start, whose files may have been cached.
START_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Supervision:
    """The limits for engine processes that hang or fail.

    Attributes:
        timeout: seconds that an engine with work may take without ending a step. A step takes
            milliseconds to seconds: the longest known, a full prompt chunk on two CPU cores, takes
            3, and kernels that are compiled at their first use take some tens. Two minutes are far
            above both, and still below the time that most clients wait.
        attempts: starts in a row that may fail.
        backoff: seconds before the next start if the last engine ended early; doubled each time.
        longest_backoff: upper bound of that delay.
    """

    timeout: float = 120.0
    attempts: int = 5
    backoff: float = 0.5
    longest_backoff: float = 30.0

    def delay(self, early: int) -> float:
        """Seconds before the next start, if the last ``early`` engines have all ended early."""
        return min(self.longest_backoff, self.backoff * 2 ** (early - 1)) if early else 0.0

    def start_limit(self, first: float | None) -> float | None:
        """The time limit of a start in seconds, or None for no limit.

        Args:
            first: seconds that the first start took; None for the first start itself, because the
                time that a model takes to load is not known before.
        """
        return None if first is None else self.timeout + START_FACTOR * first
