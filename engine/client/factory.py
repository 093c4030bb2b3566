"""Makes the client of a model's engine: one process, or several replicas."""

from __future__ import annotations

from chairlift.engine.client.placement import places, visible_devices
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.replicas import ReplicaClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.device import profile
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat


def make_client(
    config: EngineConfig,
    source: ModelSource,
    log_level: str = "info",
    log_format: LogFormat = "text",
    supervision: Supervision | None = None,
) -> ProcessClient | ReplicaClient:
    """The client of one model, not started yet.

    Imports MLX if the settings ask for replicas or devices.

    Raises:
        ModelError: the machine has not the devices that the settings ask for.
    """
    if config.replicas == 1 and config.devices is None:
        return ProcessClient(config, source, log_level, log_format, supervision)
    kind = profile.current().kind
    chosen = places(config, kind, visible_devices() if kind == "cuda" else ())
    if len(chosen) == 1:
        (place,) = chosen
        return ProcessClient(
            place.config, source, log_level, log_format, supervision, place.environment
        )
    return ReplicaClient(chosen, source, log_level, log_format, supervision)
