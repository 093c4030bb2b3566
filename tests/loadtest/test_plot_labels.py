"""The charts' texts: none overlaps another one or leaves the chart, whatever the figures are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench_run import bench_run

from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.plots.axis import axis_around, axis_from_zero
from chairlift.loadtest.plots.chart import HEIGHT, WIDTH, Chart
from chairlift.loadtest.plots.figures import (
    distribution_of,
    queue_over_time,
    requests_over_time,
    throughput_against,
)
from chairlift.loadtest.plots.labels import Box, Label

# Milliseconds and tokens per second: ordinary ones, and from nothing to far too much.
ORDINARY = st.floats(1, 500)
WIDE = st.one_of(st.just(0.0), st.floats(-6, 9).map(lambda power: 10.0**power))
VALUES = st.one_of(ORDINARY, WIDE)
TEXT = st.text("0123456789abcdefgmwMW ,./@", max_size=24)


def labels(chart: Chart) -> list[Label]:
    """The texts of the drawn chart."""
    return [
        Label(
            text.text or "",
            float(text.attrib["x"]),
            float(text.attrib["y"]),
            text.attrib["text-anchor"],  # type: ignore[arg-type]
            text.attrib["class"],
        )
        for text in chart.svg().iter("text")
    ]


def check(chart: Chart) -> list[Label]:
    """Asserts that no two texts overlap, that all are inside, and that both axes have titles."""
    found = labels(chart)
    for one, other in combinations(found, 2):
        assert not one.box.overlaps(other.box), (one, other)
    # Attributes have two decimals.
    whole = Box(-0.1, -0.1, WIDTH + 0.1, HEIGHT + 0.1)
    assert all(whole.contains(label.box) for label in found)
    titles = [label.text for label in found if label.class_ == "unit"]
    assert len(titles) == 2
    assert all(title.endswith((" (log scale)", " (linear scale)")) for title in titles)
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES, TEXT), max_size=12))
def test_labels_of_points(points: list[tuple[float, float, str]]) -> None:
    x = axis_from_zero(max((point[0] for point in points), default=0), "output tokens/s")
    chart = Chart("Points", "Some points.", x, axis_around((y for _, y, _ in points), "TTFT, ms"))
    for px, py, text in points:
        chart.add_point(px, py, "two", "tip", text)
    found = [label.text for label in check(chart) if label.class_ == "label"]
    assert len(found) <= len(points)
    # The only label always has room, unless it is as wide as half the chart.
    if len(points) == 1 and 0 < len(points[0][2]) < 12:
        assert found == [points[0][2]]


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(VALUES, min_size=1, max_size=20))
def test_labels_of_levels(levels: list[float], values: list[float]) -> None:
    chart = Chart("Bars", "Some.", axis_around([*levels, *values], "ms"), axis_from_zero(9, "n"))
    for level in levels:
        chart.add_level(level, "quiet", f"p50 {level:.1f}")
    check(chart)


def run(latencies: list[float], throughput: float, **flags: object) -> BenchRun:
    """A run whose requests have these TTFTs and gaps, in milliseconds."""
    replies = []
    for number, ms in enumerate(latencies):
        start = float(number)
        times = [start + ms / 1e3 * (step + 1) for step in range(3)]
        replies.append(Reply(10, start, times[-1], 0.0, times, 3))
    made = bench_run(count=1, **flags)
    metrics = replace(made.metrics, duration=1.0, total_output_tokens=round(throughput))
    return made._replace(replies=replies, metrics=metrics)


RUNS = st.lists(st.tuples(st.lists(VALUES, max_size=5), VALUES), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(RUNS, st.booleans())
def test_the_curves_of_a_sweep(given_runs: list[tuple[list[float], float]], rate: bool) -> None:
    flag = "request_rate" if rate else "max_concurrency"
    runs = [run(ms, speed, **{flag: n + 1}) for n, (ms, speed) in enumerate(given_runs)]
    for name in ("ttft", "itl"):
        check(throughput_against(name, runs))


def test_the_points_of_an_ordinary_sweep_all_have_their_labels() -> None:
    for count in range(1, 9):
        runs = [run([5.0 * 2**n], 100.0 * (n + 1), max_concurrency=2**n) for n in range(count)]
        found = {label.text for label in check(throughput_against("ttft", runs))}
        assert {one.config.load for one in runs} <= found


@settings(max_examples=40, deadline=None)
@given(st.lists(VALUES, max_size=30))
def test_the_charts_of_a_run(latencies: list[float]) -> None:
    one = run(latencies, 1.0)
    for chart in (distribution_of("ttft", one), distribution_of("itl", one)):
        assert sum(label.text.startswith("p") for label in check(chart)) == 2
    check(queue_over_time(one))
    check(requests_over_time(one))
