"""How many replicas a deployment should have, from its requests, its queues and its KV memory.

NOTE: Ray sends this module's code to its controller, so it imports nothing of Chairlift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class LoadPolicy:
    """Ray's default policy, and two reasons for more replicas that it cannot see.

    The number of replicas is multiplied by the largest of three ratios:

    - requests, running or waiting, to ``target_ongoing_requests``;
    - KV memory in use to ``target_kv_usage``: long conversations fill it with few requests;
    - choices running or waiting to those running, if some wait for a row.

    Ray applies the limits and the delays.
    """

    def __init__(self, target_kv_usage: float) -> None:
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        replicas = context.current_num_replicas
        if replicas == 0:
            return context.target_num_replicas, {}
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        running, waiting, usage = (
            sum(metrics.get(name, {}).values()) for name in ("running", "waiting", "kv_usage")
        )
        assert context.config is not None
        target = context.config.get_target_ongoing_requests()
        ratios = [
            context.total_num_requests / (replicas * target),
            usage / (replicas * self._target_kv_usage),
        ]
        if running and waiting:
            ratios.append((running + waiting) / running)
        return replicas * max(ratios), {}
