"""The limits of the scheduler, from the configuration and the device."""

from __future__ import annotations

import pytest

from chairlift.cache.capacity import KVGeometry
from chairlift.engine.config import EngineConfig
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.profile import CPU


@pytest.mark.parametrize("slack", [0.0, 2.5])
@pytest.mark.parametrize("ageing", [1.0, 30.0])
def test_the_order_of_requests_is_as_configured(slack: float, ageing: float) -> None:
    config = EngineConfig(prefill_slack=slack, priority_ageing=ageing)
    limits = build_limits(config, CPU, KVGeometry(100), 256, 1 << 24, 0)
    assert (limits.prefill_slack, limits.ageing) == (slack, ageing)
