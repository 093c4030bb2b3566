"""Measures the phases of a step."""

from __future__ import annotations

import time


class PhaseTimer:
    """Adds the time between its calls to named phases, in seconds."""

    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        self.start = self._last = time.monotonic()

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end of the last phase."""
        return self._last - self.start

    def end(self, phase: str) -> None:
        """Adds the time since the last call, or since the beginning, to this phase."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now
