"""The number of replicas for a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from chairlift.api.cluster.autoscaling import LoadPolicy


def wanted(replicas: int, requests: float, metrics: dict[str, list[float]] | None = None) -> float:
    """The replicas that the policy wants with a target of 10 requests and 0.8 of the KV memory."""
    context = SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=replicas or 1,
        total_num_requests=requests,
        aggregated_metrics=metrics
        and {name: dict(enumerate(values)) for name, values in metrics.items()},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10.0),
    )
    number, _ = LoadPolicy(0.8)(cast(Any, context))
    return number


def test_requests_alone() -> None:
    assert wanted(2, 20) == 2
    assert wanted(2, 50) == 5
    assert wanted(2, 0) == 0
    assert wanted(0, 0) == 1


def test_full_memory_wants_more_than_few_requests_do() -> None:
    load = {"running": [2.0, 2.0], "waiting": [0.0, 0.0], "kv_usage": [1.0, 1.0]}
    assert wanted(2, 4, load) == pytest.approx(2.5)


def test_waiting_requests_want_more() -> None:
    load = {"running": [4.0, 4.0], "waiting": [4.0, 0.0], "kv_usage": [0.1, 0.1]}
    assert wanted(2, 12, load) == pytest.approx(3)


def test_idle_replicas_want_fewer() -> None:
    load = {"running": [1.0, 0.0], "waiting": [0.0, 0.0], "kv_usage": [0.01, 0.0]}
    assert wanted(2, 1, load) < 1
