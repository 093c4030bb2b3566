"""The charts of the report, each of one run or of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from chairlift.loadtest.bench.metrics import METRIC_NAMES, Reply, latency_samples
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.plots.axis import Axis, axis_around, axis_from_zero
from chairlift.loadtest.plots.chart import BOTTOM, TOP, Chart, Ink, Stroke

_BARS = 40
# More lines than the chart has rows of pixels would cover each other.
_MAX_REQUESTS = 400
_MAX_SAMPLES = 800


class _Point(NamedTuple):
    """A run of a sweep: tokens per second, and the percentiles of a latency in milliseconds."""

    throughput: float
    median: float
    high: float
    load: str


def throughput_against(name: str, runs: Sequence[BenchRun]) -> Chart:
    """Median and 99th percentile of a latency against tokens per second, for each run."""
    short, words = METRIC_NAMES[name]
    points = [
        _Point(run.metrics.output_throughput, *_percentiles(values), run.config.load)
        for run in runs
        if (values := _samples(name, run.replies))
    ]
    chart = Chart(
        f"{short} against throughput",
        f"{words} of {len(points)} runs, median and 99th percentile in milliseconds, against"
        " output tokens a second. The lines follow the order of the runs.",
        axis_from_zero(max((point.throughput for point in points), default=0), "output tokens/s"),
        axis_around((ms for point in points for ms in (point.median, point.high)), f"{short}, ms"),
    )
    medians = [(point.throughput, point.median) for point in points]
    highs = [(point.throughput, point.high) for point in points]
    lines: tuple[tuple[str, Ink, list[tuple[float, float]]], ...] = (
        ("p50", "one", medians),
        ("p99", "two", highs),
    )
    for text, ink, line in lines:
        chart.add_key(ink, text)
        chart.add_line(line, ink)
        for point, (throughput, ms) in zip(points, line, strict=True):
            tip = f"{point.load}: {throughput:.1f} tokens/s, {text} {short} {ms:.1f} ms"
            chart.add_point(throughput, ms, ink, tip, point.load if line is highs else "")
    return chart


def distribution_of(name: str, run: BenchRun) -> Chart:
    """A histogram of a latency."""
    short, words = METRIC_NAMES[name]
    what = "gaps" if name == "itl" else "requests"
    values = _samples(name, run.replies)
    x = axis_around(values, f"{short}, ms")
    edges = np.linspace(x.low, x.high, _BARS + 1)
    if x.log:
        edges = np.geomspace(x.low, x.high, _BARS + 1)
    counts, _ = np.histogram(np.clip(values, x.low, x.high), edges)
    median, high = _percentiles(values or [0.0])
    below = sum(value < x.low for value in values)
    # Tokens that a client reads together have a gap of 0, which a logarithmic axis cannot show.
    clipped = f" The first bar holds {below} below {x.low:g} ms, too." if below else ""
    chart = Chart(
        f"Distribution of {short}",
        f"{words} of {len(values)} {what}: median {median:.1f} ms, 99th percentile {high:.1f} ms,"
        f" most {max(values, default=0):.1f} ms.{clipped}",
        x,
        axis_from_zero(float(counts.max()), what, integers=True),
    )
    for count, (start, end) in zip(counts.tolist(), pairwise(edges.tolist()), strict=True):
        if count:
            tip = f"{count} {what} of {start:.2f} to {end:.2f} ms"
            chart.add_bar(start, end, count, "one", tip)
    chart.add_level(median, "quiet", f"p50 {median:.1f}")
    chart.add_level(high, "two", f"p99 {high:.1f}")
    return chart


def queue_over_time(run: BenchRun) -> Chart:
    """Rows and queue length by the server's metrics, and requests in flight by the clients."""
    start, length = _span(run)
    flight = _thinned(_in_flight(run.replies, start))
    rows = _thinned([(sample.time - start, sample.running) for sample in run.samples])
    queue = _thinned([(sample.time - start, sample.waiting) for sample in run.samples])
    maxima = [max((count for _, count in line), default=0) for line in (flight, rows, queue)]
    by_server = (
        f"at most {maxima[1]:.0f} rows and {maxima[2]:.0f} in the queue by the server"
        if run.samples
        else "the server's metrics were not read"
    )
    chart = Chart(
        "Rows and queue",
        f"Over {length:.1f} seconds: at most {maxima[0]:.0f} requests in flight by the clients,"
        f" {by_server}.",
        Axis(0.0, length or 1.0, "seconds"),
        axis_from_zero(max(maxima), "requests", integers=True),
    )
    lines: tuple[tuple[str, Ink, list[tuple[float, float]]], ...] = (
        ("in flight", "quiet", flight),
        ("rows", "one", rows),
        ("queue", "two", queue),
    )
    for text, ink, line in lines:
        if line:
            chart.add_key(ink, text)
            chart.add_steps(line, ink)
    return chart


def requests_over_time(run: BenchRun) -> Chart:
    """Each request as a line: delayed by its client, waiting for its first token, streaming."""
    start, length = _span(run)
    order = sorted(run.replies, key=lambda reply: reply.start - reply.queue_time)
    drawn = order[:: math.ceil(len(order) / _MAX_REQUESTS)] if order else []
    outcomes = run.metrics
    chart = Chart(
        "Requests",
        f"{len(drawn)} of {len(order)} requests in the order of their arrival, over {length:.1f}"
        f" seconds; {outcomes.completed} were completed, {outcomes.failed} failed,"
        f" {outcomes.cancelled} were cancelled.",
        Axis(0.0, length or 1.0, "seconds"),
        Axis(0.0, max(1.0, len(drawn)), "requests", integers=True),
    )
    delayed: list[Stroke] = []
    waiting: list[Stroke] = []
    streaming: list[Stroke] = []
    lost: list[Stroke] = []
    for row, reply in enumerate(drawn):
        y, sent, end = row + 0.5, reply.start - start, reply.end - start
        # A request without any token is drawn as incomplete from its beginning.
        first = reply.chunk_times[0] - start if reply.chunk_times else sent
        if run.config.max_concurrency is not None:
            delayed.append(Stroke(sent - reply.queue_time, sent, y))
        waiting.append(Stroke(sent, first, y))
        (streaming if reply.ok else lost).append(Stroke(first, end, y))
    thickness = max(0.6, 0.8 * (BOTTOM - TOP) / max(1.0, chart.y.high))
    layers: tuple[tuple[str, Ink, list[Stroke]], ...] = (
        ("queued in the client", "quiet", delayed),
        ("waiting for the first token", "two", waiting),
        ("streaming", "one", streaming),
        ("failed or cancelled", "bad", lost),
    )
    for text, ink, strokes in layers:
        if strokes:
            chart.add_key(ink, text, "stroke")
            chart.add_strokes(strokes, ink, thickness)
    return chart


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    median, high = np.percentile(values, [50, 99]).tolist()
    return median, high


def _samples(name: str, replies: Sequence[Reply]) -> list[float]:
    """A latency's values in milliseconds, without incomplete replies and slow readers."""
    return [seconds * 1e3 for seconds in latency_samples(replies)[name]]


def _span(run: BenchRun) -> tuple[float, float]:
    """The time of the first request's arrival, and the seconds from it to the last reply's end."""
    start = min((reply.start - reply.queue_time for reply in run.replies), default=0.0)
    return start, max((reply.end for reply in run.replies), default=0.0) - start


def _in_flight(replies: Sequence[Reply], start: float) -> list[tuple[float, float]]:
    changes = sorted(
        [(reply.start - start, 1) for reply in replies]
        + [(reply.end - start, -1) for reply in replies]
    )
    totals = np.cumsum([change for _, change in changes]).tolist()
    return [(time, float(total)) for (time, _), total in zip(changes, totals, strict=True)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``_MAX_SAMPLES`` points: the highest of each group of neighbours."""
    size = math.ceil(len(points) / _MAX_SAMPLES) if points else 1
    return [
        max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)
    ]
