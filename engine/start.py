"""From a configuration to a machine that can take requests."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine import cpu, device
from chairlift.engine.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.errors import ModelError
from chairlift.engine.loader import LoadedModel, load_model
from chairlift.engine.messages import ModelInfo
from chairlift.engine.probe import probe
from chairlift.engine.source import ModelSource
from chairlift.scheduler.limits import Limits


def start_core(
    config: EngineConfig, source: ModelSource, on_progress: Callable[[str], None]
) -> tuple[EngineCore, ModelInfo]:
    """Loads the model, tries it, and sizes the batch to the machine.

    Raises:
        ModelError: the model cannot be loaded or served, or the limits leave it no room.
    """
    loaded = load_model(source, config.dtype, on_progress)
    return serve_loaded(config, loaded, on_progress)


def serve_loaded(
    config: EngineConfig, loaded: LoadedModel, on_progress: Callable[[str], None]
) -> tuple[EngineCore, ModelInfo]:
    """The same for a model that is in memory already."""
    on_progress("first step")
    eager = device.kind() == "cpu" and cpu.install(loaded.model)
    geometry, vocabulary = probe(loaded.model, loaded.architecture)
    try:
        limits = Limits(
            max_rows=device.max_rows(config),
            max_step_tokens=device.max_step_tokens(config),
            kv_bytes=device.kv_bytes(config),
            geometry=geometry,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    contexts = (limits.max_context, loaded.max_context, config.max_context)
    info = ModelInfo(
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        device=device.name(),
        vocab_size=vocabulary,
        max_context=min(length for length in contexts if length is not None),
        max_rows=limits.max_rows,
        max_queue=config.max_queue,
        kv_limit_bytes=limits.kv_bytes,
        kv_bytes_per_token=geometry.bytes_per_token,
        weight_bytes=loaded.weight_bytes,
    )
    return EngineCore(loaded.model, vocabulary, limits, eager), info
