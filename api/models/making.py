"""Makes the pool of a server's models: finds their files, names them and divides the memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from urllib.parse import quote

from chairlift.api.models.budget import Need, divide
from chairlift.api.models.engine_loader import EngineLoader, LoaderTools
from chairlift.api.models.entry import ModelEntry, ModelPlan
from chairlift.api.models.lifecycle import PoolListener
from chairlift.api.models.pool import ModelPool
from chairlift.api.models.spec import ModelsMemory, ModelSpec
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import check_directory
from chairlift.engine.hub.source import ModelSource, resolve
from chairlift.engine.hub.weights import weight_size

logger = logging.getLogger(__name__)

_Found = Sequence[tuple[ModelSpec, ModelSource]]


async def make_pool(
    specs: Sequence[ModelSpec], memory: ModelsMemory, tools: LoaderTools, listener: PoolListener
) -> ModelPool:
    """Makes the pool; nothing is loaded yet. Models of the hub are fetched, lazy ones too.

    Args:
        specs: the models.
        memory: what all engines may use together. A server of one model has no budget unless this
            gives one in bytes.
        tools: for the loaders.
        listener: see ``ModelPool``.

    If it is cancelled, a fetch continues on its thread.

    Raises:
        ModelError: a model does not exist or does not fit, or two models, or a model and an
            adapter, have the same name.
    """
    found = [(spec, await _fetched(spec)) for spec in specs]
    names = [spec.settings.served_model_name or source.name for spec, source in found]
    _check_names(names, specs)
    budget = memory.bytes
    parts: Mapping[str, int] = dict.fromkeys(names, 0)
    if len(specs) > 1 or memory.bytes is not None:
        budget, parts = _parts(found, names, memory)
    entries = []
    for name, (spec, source) in zip(names, found, strict=True):
        part = parts[name]
        config = own_folder(spec.config, name, specs)
        if part:
            config = replace(config, memory_bytes=part, memory_share=None)
        plan = ModelPlan(
            *(name, spec.aliases, spec.load == "eager", spec.keep_alive),
            *(spec.config.max_queue, part, tuple(lora.name for lora in spec.settings.loras)),
        )
        entries.append(ModelEntry(plan, EngineLoader(name, spec, config, source, tools)))
    return ModelPool(entries, budget, listener)


def own_folder(config: EngineConfig, name: str, specs: Sequence[ModelSpec]) -> EngineConfig:
    """``config`` with a folder of prefixes that no other model uses.

    An engine removes what it cannot use from its folder, so models that are given the same one get
    folders below it.
    """
    folder = config.prefix_cache_dir
    if folder is None or sum(spec.config.prefix_cache_dir == folder for spec in specs) == 1:
        return config
    return replace(config, prefix_cache_dir=folder / quote(name, safe=""))


async def _fetched(spec: ModelSpec) -> ModelSource:
    """Runs ``_source`` on a thread of its own: the event loop's end waits for those of its pool."""
    source: Future[ModelSource] = Future()
    source.set_running_or_notify_cancel()

    def find() -> None:
        try:
            source.set_result(_source(spec))
        except BaseException as error:
            source.set_exception(error)

    threading.Thread(target=find, name="fetch", daemon=True).start()
    return await asyncio.wrap_future(source)


def _source(spec: ModelSpec) -> ModelSource:
    config = spec.config
    source = resolve(config.model, config.trust_remote_code, config.revision)
    if source.kind == "directory":
        check_directory(source.path)
    return source


def _check_names(names: Sequence[str], specs: Sequence[ModelSpec]) -> None:
    seen: set[str] = set()
    for name, spec in zip(names, specs, strict=True):
        for each in (name, *spec.aliases):
            if each in seen:
                raise ModelError(
                    f"two models have the name {each!r}; give one another by served-model-name"
                )
            seen.add(each)
    for spec in specs:
        for lora in spec.settings.loras:
            if lora.name in seen:
                raise ModelError(f"a model and a LoRA adapter have the name {lora.name!r}")


def _parts(
    found: _Found, names: Sequence[str], memory: ModelsMemory
) -> tuple[int, Mapping[str, int]]:
    """The budget, and the bytes of each model's engine."""
    # Imports MLX, which this process has imported at its start.
    from chairlift.engine.device.memory import engine_bytes, models_budget
    from chairlift.engine.device.profile import current

    profile = current()
    budget = memory.bytes or models_budget(profile, memory.share)
    needs = []
    for name, (spec, source) in zip(names, found, strict=True):
        weights = weight_size(source, spec.config.dtype, profile.on_cpu)
        working, caches = engine_bytes(spec.config, profile, weights.vocabulary)
        # Each replica has weights of its own; the sizes of caches are for all of them together.
        engines = spec.config.replicas
        fixed = (engines * weights.bytes, engines * working)
        needs.append(Need(name, *fixed, caches, spec.load == "eager"))
    parts = divide(budget, needs)
    for need in needs:
        logger.info(
            "the model %s gets %.2f GB of %.2f GB: %.2f GB of weights, %.2f GB for steps",
            *(need.name, parts[need.name] / 1e9, budget / 1e9),
            *(need.weights / 1e9, need.working / 1e9),
        )
    return budget, parts
