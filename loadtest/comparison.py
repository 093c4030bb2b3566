"""The results of a comparison of servers: tables, ratios, and checks of Chairlift's promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from chairlift.loadtest.bench.metrics import BenchMetrics
from chairlift.loadtest.bench.verify import Verification
from chairlift.loadtest.scenarios import LongPromptResult

# Chairlift's promises for this load (the README records the figures).
MIN_SPEEDUP = 1.5
MAX_TTFT_RATIO = 1.0
# Steps with chunks may be short, and a prompt's memory is allocated once.
MAX_GAP_RATIO, MAX_GAP_SECONDS = 3.0, 1.5
MAX_IDLE_PERCENT = 2.0

_OURS = "ours"
_BASELINE = "mlx-lm"


@dataclass(slots=True)
class ServerResult:
    """The measurements of one server; None means not measured."""

    name: str
    notes: tuple[str, ...]
    metrics: BenchMetrics
    first_error: str = ""
    verification: Verification | None = None
    long_prompt: LongPromptResult | None = None
    long_prompt_error: str = ""
    idle_percent: float | None = None

    def percentile(self, latency: str, p: float) -> float:
        """A percentile of a latency in milliseconds."""
        return self.metrics.latencies[latency].percentiles[p]

    def as_json(self) -> dict[str, Any]:
        """The entry of the JSON file; times are in ms if their key ends in ``_ms``, else in s."""
        result: dict[str, Any] = {
            "notes": self.notes,
            "completed": self.metrics.completed,
            "failed": self.metrics.failed,
            "first_error": self.first_error,
            "duration": self.metrics.duration,
            "total_input_tokens": self.metrics.total_input_tokens,
            "total_output_tokens": self.metrics.total_output_tokens,
            "output_throughput": self.metrics.output_throughput,
        }
        for name, latency in self.metrics.latencies.items():
            result[f"mean_{name}_ms"] = latency.mean
            for p, ms in latency.percentiles.items():
                result[f"p{p:g}_{name}_ms"] = ms
        if self.verification is not None:
            result["verify_compared"] = self.verification.compared
            result["verify_differing"] = len(self.verification.differences)
            result["verify_failed"] = self.verification.failed
        if self.long_prompt is not None:
            result["long_prompt"] = asdict(self.long_prompt) | {"ratio": self.long_prompt.ratio}
        if self.long_prompt_error:
            result["long_prompt_error"] = self.long_prompt_error
        if self.idle_percent is not None:
            result["idle_percent"] = self.idle_percent
        return result


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """A promise, its measurement, and whether it holds."""

    promise: str
    measured: str
    holds: bool


class Comparison:
    """The results in the order of measuring, and the checks of the promises."""

    def __init__(self, results: list[ServerResult]) -> None:
        self.results = results

    @cached_property
    def checks(self) -> list[PromiseCheck]:
        """The checks of all promises that were measured."""
        return list(self._checks())

    @property
    def holds(self) -> bool:
        """Whether every measured promise holds."""
        return all(check.holds for check in self.checks)

    def result(self, name: str) -> ServerResult | None:
        """The measurements of a server, or None if it was not measured."""
        return next((result for result in self.results if result.name == name), None)

    def _checks(self) -> Iterator[PromiseCheck]:
        for result in self.results:
            failed = result.metrics.failed
            yield PromiseCheck(f"{result.name}: no request fails", f"{failed} failed", failed == 0)
        ours, theirs = self.result(_OURS), self.result(_BASELINE)
        if ours is None:
            return
        if theirs is not None:
            speedup = _ratio(ours.metrics.output_throughput, theirs.metrics.output_throughput)
            ttft = _ratio(ours.percentile("ttft", 50), theirs.percentile("ttft", 50))
            yield PromiseCheck(
                f"output tokens/s at least {MIN_SPEEDUP} x {_BASELINE}",
                f"{speedup:.2f} x",
                speedup >= MIN_SPEEDUP,
            )
            yield PromiseCheck(
                f"p50 TTFT no worse than {_BASELINE}", f"{ttft:.2f} x", ttft <= MAX_TTFT_RATIO
            )
        if ours.verification is not None:
            yield PromiseCheck(
                "no greedy reply differs from its solo run",
                f"{len(ours.verification.differences)} of {ours.verification.compared} differ",
                ours.verification.passed,
            )
        promise = (
            f"long prompt: longest gap at most {MAX_GAP_RATIO:g} x a chunk step's, "
            f"or {MAX_GAP_SECONDS:g} s"
        )
        if (long := ours.long_prompt) is not None:
            yield PromiseCheck(
                promise,
                f"{long.ratio:.2f} x, {long.longest_gap:.2f} s",
                long.ratio <= MAX_GAP_RATIO or long.longest_gap <= MAX_GAP_SECONDS,
            )
        if ours.long_prompt_error:
            yield PromiseCheck(promise, ours.long_prompt_error, holds=False)
        if ours.idle_percent is not None:
            yield PromiseCheck(
                f"idle: below {MAX_IDLE_PERCENT:g} % of a core",
                f"{ours.idle_percent:.2f} %",
                ours.idle_percent < MAX_IDLE_PERCENT,
            )


def comparison_report(comparison: Comparison) -> str:
    """Tables of throughput and of the long prompt, ratios, notes and checks."""
    lines = [
        f"{'server':<8} {'out tok/s':>10} {'p50 TTFT':>10} {'p99 TTFT':>10} {'p50 ITL':>10}"
        f" {'p99 ITL':>10} {'ok/failed':>10}   (times in ms)"
    ]
    for result in comparison.results:
        metrics = result.metrics
        times = "".join(
            f" {result.percentile(name, p):>10.1f}" for name in ("ttft", "itl") for p in (50, 99)
        )
        ended = f"{metrics.completed}/{metrics.failed}"
        lines.append(f"{result.name:<8} {metrics.output_throughput:>10.1f}{times} {ended:>10}")
    lines += _ratio_lines(comparison)
    for result in comparison.results:
        if result.first_error:
            lines.append(f"{result.name}: first error: {result.first_error}")
        lines.append(f"{result.name}: {'; '.join(result.notes)}")
    lines += _long_prompt_lines(comparison)
    for result in comparison.results:
        if result.idle_percent is not None:
            lines.append(f"{result.name}: idle, {result.idle_percent:.2f} % of a core")
    lines += [
        f"{'holds ' if check.holds else 'BROKEN'} {check.promise}: {check.measured}"
        for check in comparison.checks
    ]
    return "\n".join(lines)


def _ratio_lines(comparison: Comparison) -> list[str]:
    ours = comparison.result(_OURS)
    lines = []
    for theirs in comparison.results:
        if ours is None or theirs is ours:
            continue
        speed = _ratio(ours.metrics.output_throughput, theirs.metrics.output_throughput)
        ttft, itl = (
            _ratio(ours.percentile(name, 50), theirs.percentile(name, 50))
            for name in ("ttft", "itl")
        )
        lines.append(
            f"ours / {theirs.name}: {speed:.2f} x tokens/s, {ttft:.2f} x p50 TTFT,"
            f" {itl:.2f} x p50 ITL"
        )
    return lines


def _long_prompt_lines(comparison: Comparison) -> list[str]:
    lines = []
    for result in comparison.results:
        if result.long_prompt_error:
            lines.append(f"{result.name}: long prompt: {result.long_prompt_error}")
        long = result.long_prompt
        if long is None:
            continue
        lines.append(
            f"{result.name}: {long.prompt_tokens}-token prompt among {long.streams} streams, TTFT"
            f" {long.ttft:.2f} s; gaps between tokens: quiet median {long.quiet_gap * 1000:.0f} ms,"
            f" median during it {long.median_gap * 1000:.0f} ms, longest"
            f" {long.longest_gap * 1000:.0f} ms = {long.ratio:.2f} x ({long.gaps} gaps)"
        )
    return lines


def _ratio(ours: float, theirs: float) -> float:
    """The ratio, or inf if the other value is 0."""
    return ours / theirs if theirs else float("inf")
