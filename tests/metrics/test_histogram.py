"""The histogram counts the observations of a step as the library's counts them one by one."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from chairlift.metrics.histogram import Histogram


def test_all_observations_at_once_are_counted_as_one_by_one() -> None:
    amounts = [0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 1e9]
    texts = []
    for kind in (Histogram, prometheus_client.Histogram):
        registry = CollectorRegistry()
        family = kind("seconds", "help", ("model",), buckets=(0.5, 1.0, 2.0), registry=registry)
        histogram = family.labels("m")
        if isinstance(histogram, Histogram):
            histogram.observe_all(amounts[:3])
            histogram.observe_all([])
            histogram.observe_all(amounts[3:])
        else:
            for amount in amounts:
                histogram.observe(amount)
        texts.append(generate_latest(registry).decode().splitlines())
    ours, theirs = ([line for line in text if "_created" not in line] for text in texts)
    assert ours == theirs
