"""The result of one run of ``chairlift bench``."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from chairlift.loadtest.bench.config import BenchConfig
from chairlift.loadtest.bench.crosscheck import MetricCheck
from chairlift.loadtest.bench.metrics import BenchMetrics, Reply
from chairlift.loadtest.bench.server_metrics import QueueSample
from chairlift.loadtest.bench.verify import Verification


class BenchRun(NamedTuple):
    """The configuration, replies and metrics of a run.

    Attributes:
        config: the configuration.
        model: the model's name.
        date: the start of the run.
        metrics: the computed metrics.
        replies: the replies in the order of their requests.
        samples: rows and queue length over time; empty if no report needs them.
        interrupted: whether the run was interrupted, so that replies or checks are missing.
        checks: the comparison with the server's metrics; None if the server lacks them, or has
            none after the run.
        verification: the result of ``--verify``; None without the flag.
        server_version: the server's version; None if it has no /version.
    """

    config: BenchConfig
    model: str
    date: datetime
    metrics: BenchMetrics
    replies: list[Reply]
    samples: list[QueueSample]
    interrupted: bool = False
    checks: list[MetricCheck] | None = None
    verification: Verification | None = None
    server_version: str | None = None

    @property
    def checked(self) -> bool:
        """Whether all comparisons of client and server agree."""
        return all(check.holds for check in self.checks or ())

    @property
    def passed(self) -> bool:
        """Whether no request and none of the requested checks failed."""
        return (
            not self.metrics.failed
            and (self.verification is None or self.verification.passed)
            and (not self.config.check_metrics or (self.checks is not None and self.checked))
        )
