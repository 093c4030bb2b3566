"""The report's page: the settings, and the charts and tables of every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chairlift.loadtest.bench.files import write_file
from chairlift.loadtest.bench.metrics import METRIC_NAMES, distribution, latency_samples
from chairlift.loadtest.bench.result import BenchRun
from chairlift.loadtest.plots.about import About, lengths, masked, versions
from chairlift.loadtest.plots.chart import Chart, Key
from chairlift.loadtest.plots.figures import (
    distribution_of,
    queue_over_time,
    requests_over_time,
    throughput_against,
)
from chairlift.loadtest.plots.markup import Element, element, html
from chairlift.loadtest.plots.style import STYLE

_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_HEAD = (
    *("load", "completed", "failed", "cancelled", "req/s", "output tok/s"),
    *(f"{METRIC_NAMES[name][0]} {p}" for name in _LATENCIES for p in ("p50", "p99")),
    "server agrees",
)


def page(runs: Sequence[BenchRun], about: About) -> str:
    """The report of one run, or of all runs of a sweep, as an HTML document."""
    first = runs[0]
    title = f"Load test of {first.model}"
    parts = [element("h1", title), _facts(first), _header(runs, about)]
    if len(runs) > 1:
        curves = [throughput_against(name, runs) for name in ("ttft", "itl")]
        parts += [element("h2", "Throughput against latency"), _grid(curves)]
    parts += [element("h2", "Figures"), _table(runs)]
    if len(runs) == 1:
        parts += [element("h2", "The run"), *_run(first)]
    else:
        parts.append(element("h2", "Each run"))
        parts += [
            element("details", element("summary", run.config.load), *_run(run), open="open")
            for run in runs
        ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    return html(element("html", head, element("body", element("main", *parts)), lang="en"))


def save_page(path: str, runs: Sequence[BenchRun], about: About) -> None:
    """Writes the report.

    Raises:
        UsageError: the file cannot be written.
    """
    write_file(Path(path), page(runs, about), "--html")


def _header(runs: Sequence[BenchRun], about: About) -> Element:
    replies = [reply for run in runs for reply in run.replies]
    rows: dict[str, Element | str] = {
        "Command": element("code", about.command),
        "Versions": versions(runs[0]),
        "Machine of the load test": about.machine,
        "Lengths": lengths(replies),
    }
    made = [(element("dt", name), element("dd", value)) for name, value in rows.items()]
    return element("dl", *(part for row in made for part in row))


def _facts(run: BenchRun) -> Element:
    config = run.config
    facts = [
        run.date.strftime("%Y-%m-%d %H:%M"),
        masked(f"{config.base_url}{config.endpoint}"),
        f"data set {config.dataset_name}",
        f"seed {config.seed}",
    ]
    if config.label:
        facts.insert(0, masked(config.label, [config.api_key or ""]))
    if config.cancel_rate:
        facts.append(f"{config.cancel_rate:.0%} of the clients cancel")
    if config.slow_reader_rate:
        facts.append(f"{config.slow_reader_rate:.0%} read slowly")
    return element("p", " · ".join(facts), class_="muted")


def _run(run: BenchRun) -> list[Element]:
    charts = [
        distribution_of("ttft", run),
        distribution_of("itl", run),
        queue_over_time(run),
        requests_over_time(run),
    ]
    return [_grid(charts), *_checks(run)]


def _grid(charts: Sequence[Chart]) -> Element:
    return element("div", *map(_figure, charts), class_="grid")


def _figure(chart: Chart) -> Element:
    keys = [element("div", *map(_key, chart.keys), class_="keys")] if chart.keys else []
    return element(
        "figure",
        element("figcaption", chart.title),
        *keys,
        chart.svg(),
        element("p", chart.description),
    )


def _key(key: Key) -> Element:
    return element("span", element("i", class_=f"swatch {key.shape} {key.ink}"), key.text)


def _table(runs: Sequence[BenchRun]) -> Element:
    rows = []
    for run in runs:
        metrics = run.metrics
        samples = latency_samples(run.replies)
        found = [distribution(samples[name], (99,)) for name in _LATENCIES]
        rows.append(
            (
                run.config.load,
                *(str(n) for n in (metrics.completed, metrics.failed, metrics.cancelled)),
                f"{metrics.request_throughput:.2f}",
                f"{metrics.output_throughput:.1f}",
                *(f"{ms:.1f}" for one in found for ms in (one.median, one.percentiles[99])),
                "not compared" if run.checks is None else "yes" if run.checked else "no",
            )
        )
    note = "Latencies in milliseconds, of complete replies without slow readers."
    return _wide(note, _HEAD, rows)


def _checks(run: BenchRun) -> list[Element]:
    if run.checks is None:
        return []
    rows = [
        (check.name, check.expected, f"{check.server:.0f}", "yes" if check.holds else "no")
        for check in run.checks
    ]
    note = "What the clients know, and the server's metrics."
    return [_wide(note, ("counted", "clients", "server", "agree"), rows)]


def _wide(note: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    """A table that scrolls horizontally on a narrow screen."""
    table = element(
        "table",
        element("caption", note),
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *(element("tr", *map(_cell, row)) for row in rows)),
    )
    return element("div", table, class_="wide", tabindex="0", role="region", aria_label=note)


def _cell(text: str) -> Element:
    return element("td", text, class_="wrong") if text == "no" else element("td", text)
