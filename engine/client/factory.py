"""Makes the client of one model's engine, the only place that chooses its kind."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine.client.placement import places, visible_devices
from chairlift.engine.client.process_client import ProcessClient, RestartReason
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
    on_restart: Callable[[RestartReason], None] | None = None,
) -> ProcessClient | ReplicaClient:
    """Makes the client that serves ``source``; it is not started yet.

    Imports MLX if the settings ask for replicas or devices.

    Args:
        config: the settings of the engine, or of all replicas together.
        source: the model on disk.
        log_level: the engine's log level.
        log_format: the format of the engine's log lines.
        supervision: the limits for engines that hang or fail; None: the defaults.
        on_restart: called with the reason before each restart of an engine process.

    Raises:
        ModelError: the machine does not have the devices that the settings ask for.
    """
    client = _make_client(config, source, log_level, log_format, supervision)
    if on_restart is not None:
        client.on_restart = on_restart
    return client


def _make_client(
    config: EngineConfig,
    source: ModelSource,
    log_level: str,
    log_format: LogFormat,
    supervision: Supervision | None,
) -> ProcessClient | ReplicaClient:
    settings = (source, log_level, log_format, supervision)
    if config.replicas == 1 and config.devices is None:
        return ProcessClient(config, *settings)
    kind = profile.current().kind
    chosen = places(config, kind, visible_devices() if kind == "cuda" else ())
    if len(chosen) == 1:
        (place,) = chosen
        return ProcessClient(place.config, *settings, place.environment)
    return ReplicaClient(chosen, *settings)
