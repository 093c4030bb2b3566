"""Timelines: the wall time and the host's work of each step."""

from __future__ import annotations

import time

from chairlift.loadtest.timeline import Timeline, record


def test_waiting_is_not_counted_as_the_hosts_work() -> None:
    timeline = record(lambda: time.sleep(0.02), seconds=0.2)
    assert 3 <= len(timeline.steps) <= 10
    assert all(step.wall_ms >= 20 and step.host_ms < 15 for step in timeline.steps)
    starts = [step.start for step in timeline.steps]
    assert starts[0] == 0
    assert starts == sorted(starts)


def test_the_summary_has_medians_and_names_unknown_figures() -> None:
    steps = record(lambda: time.sleep(0.01), seconds=0.05).steps
    assert "the device is busy, %: 90, 100" in Timeline(steps, [90, 100]).summary
    assert "not known" in Timeline(steps, []).summary
    assert f"{len(steps)} steps" in Timeline(steps, []).summary
