"""Makes the client of one model's engine, the only place that chooses its kind."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine.client.process_client import ProcessClient, RestartReason
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.logs.setup import LogFormat


def make_client(
    config: EngineConfig,
    source: ModelSource,
    log_level: str = "info",
    log_format: LogFormat = "text",
    supervision: Supervision | None = None,
    on_restart: Callable[[RestartReason], None] | None = None,
) -> ProcessClient:
    """Makes the client that serves ``source``; it is not started yet.

    Args:
        config: the engine's settings.
        source: the model on disk.
        log_level: the engine's log level.
        log_format: the format of the engine's log lines.
        supervision: the limits for engines that hang or fail; None: the defaults.
        on_restart: called with the reason before each restart of an engine process.
    """
    client = ProcessClient(config, source, log_level, log_format, supervision)
    if on_restart is not None:
        client.on_restart = on_restart
    return client
