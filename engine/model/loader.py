"""Loads a model's weights: one function for every kind of source."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model as load_directory
from safetensors import SafetensorError, safe_open

from chairlift.engine.device import memory, profile
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.folder_check import (
    WEIGHTS,
    check_directory,
    damaged_file,
    text_config,
)
from chairlift.engine.hub.gguf import affine
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.model import build_model, is_quantized, own_dtype
from chairlift.engine.hub.load_errors import REMEDY, first_line, load_error
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Loading, OnProgress, silent
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.architecture import (
    argument_class,
    check_architecture,
    served_vision_type,
)
from chairlift.engine.model.dequantize import dequantize_model, group_size
from chairlift.engine.model.vision.families import is_installed, vision_type
from chairlift.engine.model.vision.loading import load_vision_model

log = logging.getLogger(__name__)

# See ``load_model``.
KeepQuantized = Callable[[int, int], bool]

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# The context in tokens is the first of these keys that a configuration has.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_QUANTIZATION_KEYS = ("quantization", "quantization_config")
_FLOAT_LAYERS = (Linear, Embedding, RMSNorm, LayerNorm, Conv1d, SwitchLinear)
# Bytes of weights that are read between two reports of the progress.
_READ_BYTES = 256 << 20
# The same where a rank keeps a part of each weight, which is read as a whole.
_READ_BYTES_OF_PARTS = 32 << 20
_HINT = "; pip install 'chairlift[vision]' serves them"
# With these RoPE scalings, a configuration contains the context before stretching.
_STRETCHING = ("linear", "dynamic", "yarn")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute batches.

    Attributes:
        dtype: the type of its floating-point parameters.
        max_context: in tokens; None if the configuration does not contain it.
        weight_bytes: memory of its parameters.
        quantized: its files contain quantized weights.
        file_dtype: the type of most floating-point numbers in its files, or the one that stands
            for theirs.
    """

    model: Module
    config: dict[str, Any]
    architecture: str
    dtype: str
    max_context: int | None
    weight_bytes: int
    quantized: bool
    file_dtype: mx.Dtype

    @property
    def has_half_precision(self) -> bool:
        """Whether the files have numbers of 16 bits."""
        return self.file_dtype in (mx.float16, mx.bfloat16)


class _OpenedModel(NamedTuple):
    """A model whose weights may still be in its files; see ``LoadedModel``."""

    model: Module
    config: dict[str, Any]
    max_context: int | None
    quantized: bool
    file_dtype: mx.Dtype


def load_model(
    source: ModelSource,
    dtype: str,
    on_progress: OnProgress = silent,
    shard: Callable[[Module], None] | None = None,
    memory_part: float = 1.0,
    text_only: bool = False,
    keep_quantized: KeepQuantized = lambda size, group: False,
) -> LoadedModel:
    """Loads the weights onto MLX's default device, and waits until they are there.

    Args:
        dtype: "auto", "float32", "float16" or "bfloat16": the type of floating-point parameters
            and of the scales of quantized ones. "auto" is float32 on the CPU, where MLX computes
            other types an order of magnitude slower, and the model's own type elsewhere. For the
            same reason a float32 model is dequantized on the CPU, unless ``keep_quantized``.
        on_progress: called while the weights are read.
        shard: keeps one rank's part of the model; called before safetensors files are read.
        memory_part: the part of the files that this device has to hold.
        text_only: a vision model is loaded without its part for images.
        keep_quantized: whether a float32 model on the CPU is not dequantized; called with the bytes
            of its files, and the weights that share a scale.

    Raises:
        ModelError: the model is missing, damaged or truncated.
        UnsupportedModel: the model is intact, but cannot be served.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    target = _DTYPES.get(dtype, mx.float32 if profile.current().on_cpu else None)
    try:
        size = _check_memory(source, memory_part)
        if source.kind == "gguf":
            kept = not profile.current().on_cpu or keep_quantized(size, affine.GROUP)
            opened = _open_gguf(source, target, kept, on_progress)
        else:
            opened = _open_directory(source, target, partial(keep_quantized, size), text_only)
        if shard is not None:
            shard(opened.model)
        adapt(opened.model)
        # A GGUF file's tensors are computed already, except for what is made of them here.
        silently = source.kind == "gguf"
        _read(
            list(_parameters(opened.model).values()),
            silent if silently else on_progress,
            _READ_BYTES if shard is None else _READ_BYTES_OF_PARTS,
        )
    except ModelError:
        raise
    except Exception as error:
        # mlx-lm, safetensors and MLX raise many types of errors; the operator gets one line.
        raise load_error(source.path, error, argument_class(source.path)) from error
    return LoadedModel(
        model=opened.model,
        config=opened.config,
        architecture=opened.config["model_type"],
        dtype=str(_float_type(opened.model)).removeprefix("mlx.core."),
        max_context=opened.max_context,
        weight_bytes=sum(array.nbytes for array in _parameters(opened.model).values()),
        quantized=opened.quantized,
        file_dtype=opened.file_dtype,
    )


def _open_gguf(
    source: ModelSource, dtype: mx.Dtype | None, keep_quantized: bool, on_progress: OnProgress
) -> _OpenedModel:
    file = GGUFFile(source.path)
    model, config = build_model(
        file,
        keep_quantized=keep_quantized,
        dtype=dtype or own_dtype(file),
        on_progress=on_progress,
    )
    context = config["max_position_embeddings"]
    return _OpenedModel(model, config, context, is_quantized(file), own_dtype(file))


def _open_directory(
    source: ModelSource,
    dtype: mx.Dtype | None,
    keep_quantized: Callable[[int], bool],
    text_only: bool,
) -> _OpenedModel:
    model, config = _from_directory(source, text_only)
    file_dtype = _float_type(model)
    if dtype is not None:
        _cast(model, dtype)
    if dtype is not None and dtype == mx.float32 and profile.current().on_cpu:
        # The part for images is computed by MLX alone.
        sees = served_vision_type(config, text_only) is not None
        if sees or not keep_quantized(group_size(model)):
            model = dequantize_model(model)
    quantized = any(config.get(key) for key in _QUANTIZATION_KEYS)
    return _OpenedModel(model, config, _max_context(config), quantized, file_dtype)


def _from_directory(source: ModelSource, text_only: bool) -> tuple[Module, dict[str, Any]]:
    path = source.path
    config = check_directory(path)
    check_architecture(path, config, text_only)
    for shard in sorted(path.glob(WEIGHTS)):
        # NOTE: MLX reads lazily, and would notice a truncated file only within a step.
        try:
            with safe_open(shard, framework="numpy"):
                pass
        except SafetensorError as error:
            raise damaged_file(shard, f"damaged or truncated: {first_line(error)}") from error
    if (kind := served_vision_type(config, text_only)) is not None:
        return load_vision_model(path, kind), config
    if vision_type(config) is not None:
        log.info("%s is served without images%s", path.name, "" if is_installed() else _HINT)
    model, config = load_directory(path, lazy=True, trust_remote_code=source.trust_remote_code)
    _check_types(path, model)
    return model, config


def _check_types(path: Path, model: Module) -> None:
    """Checks that layers which compute with floating-point numbers have such.

    mlx-lm would take the bytes of weights that another tool has packed for small numbers.

    Raises:
        UnsupportedModel: one has integers.
    """
    for name, layer in model.named_modules():
        weight = layer.get("weight") if type(layer) in _FLOAT_LAYERS else None
        if weight is not None and not mx.issubdtype(weight.dtype, mx.floating):
            kind = str(weight.dtype).removeprefix("mlx.core.")
            raise UnsupportedModel(
                f"{path}: {name}.weight has numbers of the type {kind}, without a scale; {REMEDY}"
            )


def _check_memory(source: ModelSource, part: float) -> int:
    """The bytes of a model's files.

    Raises:
        ModelError: it cannot fit; otherwise the system would kill the process.
    """
    is_gguf = source.kind == "gguf"
    files = [source.path] if is_gguf else list(source.path.glob(WEIGHTS))
    size, free = sum(file.stat().st_size for file in files), memory.free_memory()
    if size * part > free:
        share = f", {size * part / 1e9:.2f} GB for each rank" if part < 1 else ""
        raise ModelError(
            f"{source.path}: not enough memory: its files hold {size / 1e9:.2f} GB of weights"
            f"{share}, and {free / 1e9:.2f} GB are free"
        )
    return size


def _read(arrays: list[mx.array], on_progress: OnProgress, read_bytes: int) -> None:
    """Computes the arrays, which MLX reads from their files only now, this many bytes at a time."""
    begun = done = 0
    total = sum(array.nbytes for array in arrays)
    pending: list[mx.array] = []
    for array in arrays:
        pending.append(array)
        begun += array.nbytes
        if begun - done >= read_bytes or begun == total:
            on_progress(Loading("loading weights", done, total))
            mx.eval(pending)
            done = begun
            pending.clear()
    on_progress(Loading("loading weights", total, total))


def _cast(model: Module, dtype: mx.Dtype) -> None:
    """Casts floating-point parameters, except those that MLX or the model's class exempts.

    A class exempts numbers that would lose digits; to float32 they are cast, too, so that a layer
    computes in one type.
    """
    may_cast = getattr(model, "cast_predicate", lambda _: True)
    exact = dtype == mx.float32

    def is_cast(path: str, array: mx.array) -> bool:
        # NOTE: MLX takes nvfp4's scale of a whole weight only as float32.
        exempt = path.endswith(".global_scale")
        return mx.issubdtype(array.dtype, mx.floating) and not exempt and (exact or may_cast(path))

    old = _parameters(model)
    new = [(path, array.astype(dtype)) for path, array in old.items() if is_cast(path, array)]
    model.load_weights(new, strict=False)


def _parameters(model: Any) -> dict[str, mx.array]:
    """Parameters by dotted path. (mlx.nn has no types, hence Any.)"""
    return dict(tree_flatten(model.parameters()))


def _float_type(model: Module) -> mx.Dtype:
    """The type of most of its floating-point numbers."""
    counts: Counter[mx.Dtype] = Counter()
    for array in _parameters(model).values():
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] += array.size
    return counts.most_common(1)[0][0]


def _max_context(config: dict[str, Any]) -> int | None:
    """The context in tokens by a Hugging Face configuration, after RoPE stretching."""
    text = text_config(config)
    known = [text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)]
    context: int | None = known[0] if known else None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    # Gemma 3's configurations contain the stretched context although they scale linearly.
    if context is None or kind not in _STRETCHING or "gemma3" in config["model_type"]:
        return context
    if kind == "yarn":
        context = scaling.get("original_max_position_embeddings") or context
    return math.floor(context * float(scaling.get("factor") or 1.0))
