"""Describes several replicas as one engine: their properties, and the statistics of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.engine.messages import ModelInfo, StepStats

# The fields of StepStats that say how much there is now. All others count what a step did.
LEVELS = (
    "image_bytes",
    *("running", "waiting", "adapters_running"),
    *("prefix_bytes", "store_bytes", "swapped_bytes"),
    *("kv_reserved_bytes", "kv_used_bytes", "kv_limit_bytes"),
    *("memory_active", "memory_peak", "memory_cache"),
)


def combined_info(infos: Sequence[ModelInfo]) -> ModelInfo:
    """The properties of all replicas together; at least one."""
    least = min(infos, key=lambda info: info.max_context)
    return msgspec.structs.replace(
        least,
        max_rows=min(info.max_rows for info in infos) * len(infos),
        kv_limit_bytes=sum(info.kv_limit_bytes for info in infos),
        prefix_bytes=sum(info.prefix_bytes for info in infos),
        replicas=len(infos),
    )


class Levels:
    """The latest levels of each replica, and their sums."""

    def __init__(self, replicas: int) -> None:
        self._latest = [StepStats() for _ in range(replicas)]

    def latest(self, replica: int) -> StepStats:
        """A replica's last step; empty before the first and after a crash."""
        return self._latest[replica]

    def record(self, replica: int, stats: StepStats) -> None:
        """Takes the levels from a replica's step."""
        self._latest[replica] = stats

    def summed(self, stats: StepStats, waiting: int) -> StepStats:
        """``stats`` with the sums over all replicas as levels.

        Args:
            waiting: choices that wait without a replica.
        """
        sums: dict[str, Any] = {name: self._sum(name) for name in LEVELS}
        sums["waiting"] += waiting
        return msgspec.structs.replace(stats, **sums)

    def _sum(self, name: str) -> Any:
        values = [getattr(latest, name) for latest in self._latest]
        if not isinstance(values[0], dict):
            return sum(values)
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
