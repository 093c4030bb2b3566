"""What came of one run of ``chairlift bench``."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.crosscheck import Check
from chairlift.loadtest.bench.metrics import BenchMetrics, Reply
from chairlift.loadtest.bench.server_metrics import QueueSample
from chairlift.loadtest.bench.verify import Verification


class BenchRun(NamedTuple):
    """All that is known of a run.

    ``date`` is when it began; ``samples`` are rows and queue while it ran, where a report wants
    them. ``checks`` is None where the server has no such metrics, ``verification`` where none was
    asked for.
    """

    config: BenchConfig
    model: str
    date: datetime
    metrics: BenchMetrics
    replies: list[Reply]
    samples: list[QueueSample]
    checks: list[Check] | None
    verification: Verification | None

    @property
    def checked(self) -> bool:
        """Whether client and server agree, as far as they were compared."""
        return all(check.holds for check in self.checks or ())

    @property
    def passed(self) -> bool:
        """Whether nothing failed of what the flags ask for."""
        return (
            not self.metrics.failed
            and (self.verification is None or self.verification.passed)
            and (self.checked or not self.config.check_metrics)
        )
