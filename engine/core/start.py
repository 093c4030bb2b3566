"""Builds an engine core from a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.quantized import HalfPrecision, Quantization, Storage
from chairlift.cache.saved.layers import LayerTemplate
from chairlift.cache.saved.nodes import fingerprint, weights_sample
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.swap.files import SwapFiles
from chairlift.cache.swap.swap import Swap
from chairlift.engine.config import EngineConfig
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.core.background import Background
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.prepared_model import PreparedModel, prepare_model
from chairlift.engine.core.warm import warm_model
from chairlift.engine.cpu.kernels import keeps_quantized
from chairlift.engine.device import memory, profile
from chairlift.engine.device.dispatch import Dispatcher, make_dispatcher
from chairlift.engine.device.impossible import check_model_settings, check_settings
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.openmp import remove_registration
from chairlift.engine.errors import ModelError
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.language import Lexicon, lexicon
from chairlift.engine.hub.source import ModelSource, resolve
from chairlift.engine.hub.weights import tensor_places
from chairlift.engine.lora.adapters import AdapterLimits
from chairlift.engine.messages import Loading, ModelInfo, OnProgress
from chairlift.engine.model.loader import LoadedModel, load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.parallel.ranks import ALONE, Ranks
from chairlift.engine.speculation.proposal import proposers
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence


def start_core(
    config: EngineConfig,
    source: ModelSource,
    on_progress: OnProgress,
    ranks: Ranks = ALONE,
    background: Seq[Background] = (),
) -> tuple[EngineCore, ModelInfo]:
    """Loads the model, probes it, and adapts the size of the batch to the machine.

    Args:
        ranks: those that compute the model together; all of them call this at once.
        background: see ``EngineCore``.

    Raises:
        ModelError: the model cannot be loaded or served, or does not fit the limits.
    """
    check_settings(config, profile.current())
    dispatcher = make_dispatcher(ranks.size)
    if config.tensor_parallel_size != ranks.size:
        raise ModelError("tensor parallelism needs an engine in a process of its own")
    part = ranks.sharing / ranks.size
    shard = ranks.shard if ranks.size > 1 else None
    # mlx-vlm's models cannot be divided.
    text_only = config.text_only or ranks.size > 1
    loaded = ranks.together(
        lambda: load_model(
            *(source, config.dtype, on_progress, shard, part, text_only),
            keeps_quantized if ranks.size == 1 else lambda size, group: False,
        )
    )
    return serve_loaded(config, loaded, on_progress, source, ranks, background, dispatcher)


def serve_loaded(
    config: EngineConfig,
    loaded: LoadedModel,
    on_progress: OnProgress,
    source: ModelSource | None = None,
    ranks: Ranks = ALONE,
    background: Seq[Background] = (),
    dispatcher: Dispatcher | None = None,
) -> tuple[EngineCore, ModelInfo]:
    """Builds a core for a loaded model; prefixes on disk and grammars need its ``source``."""
    device = profile.current()
    begin = _Parts(on_progress, device.compiles_kernels).begin
    begin()
    # Rounding quantized weights a little more loses almost nothing. With a configured type,
    # however, nothing is rounded.
    exactly = config.dtype != "auto" or not loaded.quantized
    spare = memory.spare_bytes(config, ranks.sharing)
    # The part for images stays as it is: its graph is built at once and computed in parts.
    is_vision = isinstance(loaded.model, VisionModel)
    part = loaded.model.model.language_model if is_vision else loaded.model
    acceleration = accelerate(part, exactly, spare)
    half = acceleration.half_kv and not is_vision and loaded.has_half_precision
    storage = kv_storage(config, half)
    begin()
    geometry, vocabulary, layers = probe(loaded.model, loaded.architecture, storage)
    draft_model = _draft_model(config, source, on_progress)
    if draft_model is not None:
        geometry = draft_model.beside(geometry)
    check_model_settings(config, device, vocabulary, loaded.max_context)
    planned = memory.plan_kv_memory(config, device, vocabulary, ranks.sharing)
    swap_bytes = memory.swap_bytes(config, device, ranks.sharing)
    kv_bytes, prefix_bytes, swap_bytes = ranks.smallest(*planned, swap_bytes)
    buffers = memory.configure_mlx(device, memory.part_bytes(config, ranks.sharing))
    try:
        limits = build_limits(config, device, geometry, vocabulary, kv_bytes, prefix_bytes)
    except ValueError as error:
        raise ModelError(str(error)) from error
    begin()
    model = prepare_model(
        *(loaded.model, vocabulary, limits.chunk_multiple, acceleration.eager, storage),
        kernels=acceleration.pages,
        score_bytes=device.attention_bytes,
        ranks=ranks,
        adapter_limits=AdapterLimits(config.max_loras, config.max_lora_rank),
    )
    try:
        limits = model.adapt_limits(limits)
    except ValueError as error:
        raise ModelError(str(error)) from error
    info = _model_info(config, loaded, model, limits, prefix_bytes)
    compiler = None if source is None else Compiler(partial(_lexicon, source, vocabulary))
    store = _store(config, loaded, source, layers, storage)
    swap = _swap(config, layers, swap_bytes)
    begin()
    warm_model(model, limits, kernels=device.compiles_kernels)
    core = EngineCore(
        *(model, limits, prefix_bytes, store, swap, compiler, background, ranks.journal),
        propose=partial(proposers, config=config.speculative),
        prefix_drafts=config.speculative is not None and config.speculative.looks_up,
        draft_model=None if draft_model is None else draft_model.prepared,
        buffers=buffers,
        dispatcher=dispatcher,
    )
    core.compile()
    # MKL registered this process for its first product. A process that is killed would leave that.
    remove_registration(os.getpid())
    return core, info


def _model_info(
    config: EngineConfig,
    loaded: LoadedModel,
    model: PreparedModel,
    limits: Limits,
    prefix_bytes: int,
) -> ModelInfo:
    """The properties of the model that the API process needs."""
    contexts = (limits.max_context, loaded.max_context, config.max_context)
    device = profile.current()
    return ModelInfo(
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        device=profile.name(),
        on_cpu=device.on_cpu,
        vocab_size=model.vocabulary,
        max_context=min(length for length in contexts if length is not None),
        max_rows=limits.max_rows,
        max_queue=config.max_queue,
        kv_limit_bytes=limits.kv_bytes,
        prefix_bytes=prefix_bytes,
        kv_bytes_per_token=limits.geometry.bytes_per_token,
        weight_bytes=loaded.weight_bytes,
        limits=limits,
        hidden_size=model.hidden_size,
        speculates=config.speculative is not None,
        vision_type=None if model.vision is None else model.vision.model_type,
        kv_bits=config.kv_bits,
        kv_group_size=config.kv_group_size if config.kv_bits else None,
    )


class _Parts:
    """Reports the parts of a start after the weights are loaded.

    Args:
        compiles: each part compiles kernels, which at the first start takes up to a minute.
    """

    NUMBER = 4

    def __init__(self, on_progress: OnProgress, compiles: bool) -> None:
        self._on_progress, self._compiles = on_progress, compiles
        self._begun = 0

    def begin(self) -> None:
        """Reports the next part."""
        self._begun += 1
        if self._compiles:
            text = f"compiling kernels, part {self._begun} of {self.NUMBER}"
            self._on_progress(Loading(text))
        elif self._begun == 1:
            self._on_progress(Loading("first step"))


class _DraftModel(NamedTuple):
    """A draft model, and the bytes of a token in its caches."""

    prepared: PreparedModel
    token_bytes: int

    def beside(self, geometry: KVGeometry) -> KVGeometry:
        """The geometry of a model whose tokens are in the draft model's caches as well.

        Raises:
            ModelError: no layer of the model has full attention, so it has no size per token to add
                the draft model's to.
        """
        if not geometry.full_bytes:
            raise ModelError("a model without full attention cannot have a draft model")
        return replace(geometry, full_bytes=geometry.full_bytes + self.token_bytes)


def kv_storage(config: EngineConfig, half: bool) -> Storage | None:
    """How keys and values are stored; None: in the type in which the model computes.

    Args:
        half: the model's files have numbers of 16 bits, and a kernel reads float16.
    """
    if config.kv_bits:
        return Quantization(config.kv_bits, config.kv_group_size)
    return HalfPrecision() if half and config.dtype == "auto" else None


def _draft_model(
    config: EngineConfig, source: ModelSource | None, on_progress: OnProgress
) -> _DraftModel | None:
    """Loads the configured draft model; None if there is none.

    Raises:
        ModelError: it cannot be loaded, or does not fit the model.
    """
    if config.speculative is None or config.speculative.model is None or source is None:
        return None
    own = resolve(config.speculative.model, config.trust_remote_code)
    if load_tokenizer(own).get_vocab() != load_tokenizer(source).get_vocab():
        raise ModelError(f"the draft model {own.name} has another vocabulary than {source.name}")
    loaded = load_model(
        *(own, config.dtype, on_progress), text_only=True, keep_quantized=keeps_quantized
    )
    exactly = config.dtype != "auto" or not loaded.quantized
    eager = accelerate(loaded.model, exactly).eager
    geometry, vocabulary, _ = probe(loaded.model, loaded.architecture)
    if not geometry.pads:
        raise ModelError(
            f"the draft model {own.name} has recurrent layers, which take nothing back"
        )
    prepared = prepare_model(loaded.model, vocabulary, eager=eager)
    return _DraftModel(replace(prepared, max_context=loaded.max_context), geometry.bytes_per_token)


def _lexicon(source: ModelSource, vocabulary: int) -> Lexicon:
    return lexicon(load_tokenizer(source), vocabulary)


def _swap(config: EngineConfig, layers: list[LayerTemplate], size: int) -> Swap[Sequence]:
    directory = config.swap_dir
    try:
        files = None if directory is None else SwapFiles(directory, config.swap_dir_bytes)
    except OSError as error:
        raise ModelError(f"swap-dir {directory}: {error}") from error
    kinds = [layer.kind for layer in layers]
    offloads = profile.current().offloads_swap
    return Swap(kinds, size, files, offloads, lambda sequence: sequence.rank)


def _store(
    config: EngineConfig,
    loaded: LoadedModel,
    source: ModelSource | None,
    layers: list[LayerTemplate],
    storage: Storage | None,
) -> PrefixStore | None:
    directory = config.prefix_cache_dir
    if directory is None or source is None:
        return None
    stored: list[int | str] = [config.kv_bits, config.kv_group_size] if config.kv_bits else []
    if isinstance(storage, HalfPrecision):
        stored.append("float16")
    configuration = json.dumps(loaded.config, sort_keys=True, default=str)
    try:
        model = fingerprint(
            loaded.architecture,
            loaded.dtype,
            configuration,
            weights_sample(tensor_places(source)),
            *stored,
        )
        kinds = [layer.kind for layer in layers]
        return PrefixStore(directory, config.prefix_cache_dir_bytes, model, kinds, layers)
    except OSError as error:
        raise ModelError(f"prefix-cache-dir {directory}: {error}") from error
