"""Writes docs/reference/metrics.md from the table of metrics.

``python -m chairlift.metrics.reference > docs/reference/metrics.md``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from chairlift.metrics.table import ENGINE, MODEL, SERVER, Metric

_HEAD = """\
# Metrics

Generated from `metrics/table.py` by `python -m chairlift.metrics.reference`; a test compares
this page with the code. [Observability](../guides/observability.md) explains how they are
scraped, and has the dashboard and the alerts.

All times are in seconds and all sizes in bytes. A histogram exposes `_bucket`, `_sum` and
`_count` series. The server's counters exist
at 0 from the start, a model's from its first load, so that `rate` and `increase` see the first
event; those with several labels appear with that event.
"""
_SECTIONS = (
    (
        "Model",
        "These have vLLM's names and carry the labels `model_name` and `engine`.",
        MODEL,
    ),
    (
        "Engine",
        "Steps, memory and caches of the engine process. On a server of several models, they carry "
        "the label `model_name`, too.",
        ENGINE,
    ),
    (
        "HTTP server",
        "Requests, the event loop, loads of models, engine restarts and the canary.",
        SERVER,
    ),
)


def page() -> str:
    """The whole page, in Markdown."""
    lines = [_HEAD]
    for title, text, metrics in _SECTIONS:
        lines += [f"## {title}\n", f"{text}\n", *_table(metrics)]
    lines.append("Prometheus's usual `process_*` metrics describe the process that serves HTTP.\n")
    return "\n".join(lines)


def _table(metrics: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | type | meaning | last label's values |"
    yield "|---|---|---|---|"
    for metric in metrics:
        values = ", ".join(f"`{value}`" for value in metric.values_for(1))
        if metric.values == "positions":
            values += ", …"
        yield f"| `{exposed_name(metric)}` | {metric.kind} | {metric.help} | {values} |"
    yield ""


def exposed_name(metric: Metric) -> str:
    """The name as Prometheus sees it, with its labels: ``requests_total{route,status}``."""
    suffix = "_total" if metric.kind == "counter" else ""
    labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
    return f"{metric.name}{suffix}{labels}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(), end="")
