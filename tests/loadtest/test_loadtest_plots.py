"""The HTML report: its axes and figures, and that it loads no other file."""

from __future__ import annotations

import re

import pytest
from support.bench_run import bench_run
from support.page.page_check import check_page

from chairlift.loadtest.bench.metrics import Reply, compute_metrics
from chairlift.loadtest.plots.about import About, masked
from chairlift.loadtest.plots.axis import Axis, axis_around, axis_from_zero, shown
from chairlift.loadtest.plots.figures import distribution_of, queue_over_time, requests_over_time
from chairlift.loadtest.plots.page import page

ABOUT = About("chairlift bench --html report.html", "a processor, 2 CPUs")


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (axis_from_zero(9.3, "s"), [0, 2, 4, 6, 8, 10]),
        (axis_from_zero(0.0007, "s"), [0, 0.0002, 0.0004, 0.0006, 0.0008]),
        (axis_from_zero(3, "n", integers=True), [0, 1, 2, 3]),
        (axis_from_zero(0, "n", integers=True), [0, 1]),
        (Axis(0.0, 15.1, "s"), [0, 5, 10, 15]),
        (axis_around([4, 90], "ms"), [0, 20, 40, 60, 80, 100]),
        (axis_around([0, 3, 470], "ms"), [2, 5, 10, 20, 50, 100, 200, 500]),
        (axis_around([0.003, 47_000], "ms"), [0.01, 0.1, 1, 10, 100, 1000, 10_000]),
        (axis_around([0, 0], "ms"), [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_axes_cover_their_values_and_have_round_ticks(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks == pytest.approx(ticks)
    places = [axis.position(tick) for tick in axis.ticks]
    assert places == sorted(places)
    assert axis.position(axis.low) == 0
    assert axis.position(axis.high) == pytest.approx(1)
    assert axis.position(axis.high * 2) == axis.position(axis.high)


def test_numbers_beside_an_axis_are_short() -> None:
    assert [shown(n) for n in (0, 0.5, 1500, 20_000, 3e6, 2e12)] == [
        *("0", "0.5", "1500", "20k", "3M", "2e12")
    ]


def test_figures_are_described_in_words() -> None:
    run = bench_run()
    # 34 of 50 are complete: every seventh failed, every fifth of the others was cancelled.
    assert run.metrics.completed == 34
    ttft = distribution_of("ttft", run)
    assert ttft.description.startswith("Time to First Token of 34 requests: median 7")
    # Tokens that arrive together have gaps of 0, which a logarithmic scale cannot show.
    wide = bench_run()
    for i, reply in enumerate(wide.replies):
        reply.chunk_times = [reply.start, reply.start, reply.start + 0.001 * 2 ** (i % 9)]
    itl = distribution_of("itl", wide)
    assert itl.x.log
    assert "68 gaps" in itl.description
    assert itl.description.endswith("The first bar holds 34 below 1 ms, too.")
    reported = "at most 2 rows and 1 in the queue by the server."
    assert queue_over_time(run).description.endswith(reported)
    unread = queue_over_time(run._replace(samples=[]))
    assert unread.description.endswith("the server's metrics were not read.")
    assert [key.text for key in unread.keys] == ["in flight"]
    assert "34 were completed, 7 failed, 9 were cancelled" in requests_over_time(run).description
    assert requests_over_time(bench_run(1000)).description.startswith("334 of 1000 requests")


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    hostile = "</title><script>alert(1)</script><img src=https://example.com/x>"
    checked = check_page(page([bench_run(label=hostile, text=hostile)], ABOUT))
    assert hostile in checked.text
    assert checked.charts == [
        "Distribution of TTFT",
        "Distribution of ITL",
        "Rows and queue",
        "Requests",
    ]
    assert "requests ended" in checked.text
    assert "at least 3, at most 4" in checked.text


def test_the_page_of_a_sweep_has_its_curves_and_all_runs() -> None:
    runs = [bench_run(max_concurrency=n) for n in (1, 2, 4)]
    assert page(runs, ABOUT) == page(runs, ABOUT)
    checked = check_page(page(runs, ABOUT))
    assert checked.charts[:2] == ["TTFT against throughput", "ITL against throughput"]
    assert len(checked.charts) == 2 + 3 * 4
    assert checked.text.count("2 at once") >= 3


def test_the_page_of_a_run_where_all_requests_failed_is_complete() -> None:
    run = bench_run()
    replies = [Reply(10, start=1.0, end=1.0, error="refused") for _ in range(3)]
    metrics = compute_metrics(replies, 1.0, {}, [99])
    failed = run._replace(replies=replies, metrics=metrics, samples=[], checks=None)
    assert len(check_page(page([failed], ABOUT)).charts) == 4
    assert len(check_page(page([failed, run], ABOUT)).charts) == 10


def test_the_header_tells_how_the_report_was_made() -> None:
    runs = [bench_run(max_concurrency=n)._replace(server_version="9.8") for n in (1, 2)]
    text = check_page(page(runs, ABOUT)).text
    for part in (
        *(ABOUT.command, ABOUT.machine, "server 9.8", "chairlift bench "),
        "prompts of 10 tokens, replies of 8 tokens",
    ):
        assert part in text
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert f"{name} p50{name} p99" in text
    assert len(re.findall(r"\((?:log|linear) scale\)", text)) == 2 * (2 + 2 * 4)
    refused = [Reply(10, start=1.0, end=1.0, error="refused")]
    unknown = check_page(page([bench_run()._replace(replies=refused)], ABOUT)).text
    assert "replies of no tokens" in unknown
    assert "server unknown" in unknown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host:1/a", "http://***@host:1/a"),
        ("https://token@host", "https://***@host"),
        ("http://host/metrics?key=abc&b=c", "http://host/metrics?key=***&b=***"),
        ("label of sk-12345 and sk-1234", "label of *** and ***"),
        ("a - b", "a - b"),
        ("ttft:500", "ttft:500"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert masked(text, ["sk-1234", "sk-12345", "-", ""]) == shown
