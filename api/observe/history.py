"""The last fifteen minutes of the server: one sample every two seconds, watched or not.

A step adds its numbers to the current interval; the end of an interval makes a sample of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from chairlift.engine.messages import StepStats
from chairlift.metrics.quantiles import Quantiles

INTERVAL_SECONDS = 2.0
SPAN_SECONDS = 900.0
MAX_SAMPLES = round(SPAN_SECONDS / INTERVAL_SECONDS)
# The span of latencies and prefix hits that are shown as one number.
WINDOW_SECONDS = 60.0
# A shorter interval is not ended: its tokens a second would mean nothing.
MIN_SECONDS = INTERVAL_SECONDS / 4
# The ended intervals over which tokens a second are counted, beside the current one.
PACE_INTERVALS = 2

# NOTE: this clock also counts while the machine sleeps; macOS's CLOCK_MONOTONIC does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Moment(NamedTuple):
    """A point in time on two clocks that nobody can set, in seconds.

    Attributes:
        at: counts also while the machine sleeps.
        awake: does not.
    """

    at: float
    awake: float

    @classmethod
    def now(cls) -> Moment:
        """The present."""
        return cls(time.clock_gettime(_CLOCK), time.monotonic())


class Sample(msgspec.Struct, frozen=True):
    """One interval. A value is None where there was nothing to measure.

    Attributes:
        at: its end, by the clock of ``Moment.at``.
        seconds: its length, without the time that the machine slept.
        serving: whether requests could be served at its end.
        restarts: how often the engine was restarted in it.
        generated_pace: output tokens a second. This and the next four are None if the engine could
            not serve and took no step.
        prefilled_pace: prompt tokens computed a second.
        running: choices in the batch at its end.
        waiting: waiting choices at its end.
        kv_share: the used share of the KV memory (0 to 1) at its end; None without a model, too.
        ttft_p50, ttft_p99: seconds to the first token, of the choices that got it in the interval.
        itl_p50, itl_p99: seconds between two tokens.
        requests: requests that ended.
        failed: those of ``requests`` that failed by the server's fault.
    """

    at: float
    seconds: float
    serving: bool
    restarts: int
    generated_pace: float | None
    prefilled_pace: float | None
    running: int | None
    waiting: int | None
    kv_share: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    requests: int
    failed: int


@dataclass(slots=True)
class Interval:
    """Totals of the steps and requests since ``start``."""

    start: Moment
    steps: int = 0
    generated: int = 0
    prefilled: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    requests: int = 0
    failed: int = 0
    restarts: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    itl: Quantiles = field(default_factory=Quantiles)

    def add_step(self, stats: StepStats) -> None:
        """Adds an engine step."""
        first, following = stats.first_token_latencies, stats.inter_token_latencies
        # Stats without either only report ended choices, perhaps of an engine that is gone.
        self.steps += bool(stats.rows or stats.prefill_tokens)
        self.generated += stats.output_tokens
        self.prefilled += stats.prefill_tokens
        self.prefix_queries += stats.prefix_queries
        self.prefix_hits += stats.prefix_hits
        self.ttft.add(first)
        self.itl.add(following)

    def sample(self, end: Moment, latest: StepStats, serving: bool, kv_limit: int) -> Sample:
        """The interval's sample; ``latest`` is the last step, perhaps of an earlier interval."""
        seconds = end.awake - self.start.awake
        known = serving or self.steps > 0
        ttft_p50, ttft_p99 = self.ttft.at((0.5, 0.99)) or (None, None)
        itl_p50, itl_p99 = self.itl.at((0.5, 0.99)) or (None, None)
        return Sample(
            round(end.at, 3),
            round(seconds, 3),
            serving,
            self.restarts,
            _rounded(self.generated / seconds) if known else None,
            _rounded(self.prefilled / seconds) if known else None,
            latest.running if known else None,
            latest.waiting if known else None,
            _rounded(latest.kv_used_bytes / kv_limit) if known and kv_limit else None,
            _rounded(ttft_p50),
            _rounded(ttft_p99),
            _rounded(itl_p50),
            _rounded(itl_p99),
            self.requests,
            self.failed,
        )


class History:
    """The samples of SPAN_SECONDS, and the sums of WINDOW_SECONDS.

    Attributes:
        current: the interval that has not ended.
    """

    def __init__(self, start: Moment) -> None:
        self.current = Interval(start)
        # The latest step of each model's engine.
        self._latest: dict[str, StepStats] = {}
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._ended = 0
        self._window: deque[Interval] = deque(maxlen=round(WINDOW_SECONDS / INTERVAL_SECONDS))

    def add_step(self, stats: StepStats, model: str = "") -> None:
        """Records a step of the model's engine."""
        self._latest[model] = stats
        self.current.add_step(stats)

    def forget_steps(self, model: str) -> None:
        """Forgets the latest step of a model that was unloaded."""
        self._latest.pop(model, None)

    @property
    def latest(self) -> StepStats:
        """The gauges of all engines' latest steps, summed."""
        steps = self._latest.values()
        if len(steps) == 1:
            return next(iter(steps))
        return StepStats(
            running=sum(stats.running for stats in steps),
            waiting=sum(stats.waiting for stats in steps),
            kv_used_bytes=sum(stats.kv_used_bytes for stats in steps),
            kv_reserved_bytes=sum(stats.kv_reserved_bytes for stats in steps),
            prefix_bytes=sum(stats.prefix_bytes for stats in steps),
        )

    def end_interval(self, now: Moment, serving: bool, kv_limit: int) -> None:
        """Makes a sample of the current interval and begins the next one.

        Args:
            now: the present.
            serving: whether requests can be served now.
            kv_limit: the limit of the KV memory in bytes; 0 if it is not known.
        """
        if now.awake - self.current.start.awake < MIN_SECONDS:
            return
        self._samples.append(self.current.sample(now, self.latest, serving, kv_limit))
        self._ended += 1
        while self._samples[0].at <= now.at - SPAN_SECONDS:
            self._samples.popleft()
        self._window.append(self.current)
        self.current = Interval(now)

    def since(self, number: int) -> tuple[Sequence[Sample], int]:
        """The samples after the first ``number`` ones, as far as kept, and how many ever ended."""
        samples = list(self._samples)
        missed = min(len(samples), self._ended - number)
        return samples[len(samples) - missed :], self._ended

    def last_minute(self, now: Moment) -> Interval:
        """The sum of the intervals that began in the last WINDOW_SECONDS."""
        return self._sum([each for each in self._window if each.start.at > now.at - WINDOW_SECONDS])

    def paces(self, now: Moment) -> tuple[float, float]:
        """Output tokens and computed prompt tokens a second, over the last few seconds."""
        recent = self._sum(list(self._window)[-PACE_INTERVALS:])
        # A server that has just started has measured for no time.
        seconds = max(MIN_SECONDS, now.awake - recent.start.awake)
        return recent.generated / seconds, recent.prefilled / seconds

    def _sum(self, ended: Sequence[Interval]) -> Interval:
        """The sum of some intervals and the current one."""
        intervals = [*ended, self.current]
        total = Interval(intervals[0].start)
        for each in intervals:
            total.generated += each.generated
            total.prefilled += each.prefilled
            total.prefix_queries += each.prefix_queries
            total.prefix_hits += each.prefix_hits
            total.ttft.update(each.ttft)
            total.itl.update(each.itl)
        return total


def _rounded(value: float | None) -> float | None:
    """``value`` with four digits: quantiles are no more precise, and the page gets 450 samples."""
    return None if value is None else float(f"{value:.4g}")
