"""Reads an adapter's folder, and checks it against the layers of a model."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, deserialize

from chairlift.engine.errors import AdapterError
from chairlift.engine.lora.config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS, LoraConfig, parse_config
from chairlift.engine.lora.low_rank import Factors

# Names of tensors behind the layer's, and which of both matrices they are.
_MLX_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[ab])")
_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight"
)
# Parts of models of images or sounds beside the language model, whose blocks can be named like its.
_OTHER_PART = re.compile(r"vis|vit|vpm|image|img|audio|speech|talker|encoder|tower|projector")
_DTYPES: dict[object, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class Shape(NamedTuple):
    """The inputs and outputs of a linear layer.

    Attributes:
        folded: ``[outputs]``, see ``folded_factors``; None: all are 1.
    """

    inputs: int
    outputs: int
    folded: mx.array | None = None


class AdapterFiles(NamedTuple):
    """A valid adapter for a model.

    Attributes:
        digest: SHA-256 of its files: 64 hexadecimal digits.
        rank: the width of its matrices.
        factors: float32 matrices by the layer's name in the model.
    """

    digest: str
    rank: int
    factors: dict[str, Factors]


def read_adapter(
    folder: Path, layers: Mapping[str, Shape], max_rank: int, max_bytes: int
) -> AdapterFiles:
    """Reads an adapter and checks it completely.

    Args:
        layers: the layers of the model that may have adapters, by name.
        max_rank: the largest rank that is accepted.
        max_bytes: the largest file of weights that is accepted.

    Raises:
        AdapterError: a file is missing, damaged, or not for this model; the message names it.
    """
    text = _read(folder / CONFIG, max_bytes)
    config = parse_config(folder / CONFIG, text)
    if config.rank > max_rank:
        raise AdapterError(f"{folder}: its rank is {config.rank}; --max-lora-rank is {max_rank}")
    path = folder / config.weights
    if not path.exists() and (folder / _other(config)).exists():
        raise AdapterError(f"{folder}: {CONFIG} belongs to {config.weights}, which is not there")
    data = _read(path, max_bytes)
    digest = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(data).digest())
    try:
        factors = _factors(_tensors(data), config, layers)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from None
    return AdapterFiles(digest.hexdigest(), config.rank, factors)


def _other(config: LoraConfig) -> str:
    return MLX_WEIGHTS if config.is_peft else PEFT_WEIGHTS


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if not path.is_file():
            raise AdapterError(f"{path}: no such file")
        if (size := path.stat().st_size) > max_bytes:
            raise AdapterError(f"{path}: {size} bytes; there is memory for {max_bytes}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(f"{path}: {cause}") from error


def _tensors(data: bytes) -> dict[str, mx.array]:
    """The tensors of a safetensors file, in float32.

    Raises:
        AdapterError: the file is damaged, or has values that are not finite floating-point numbers.
    """
    try:
        parts: list[tuple[str, Any]] = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"damaged or truncated: {str(error).splitlines()[0]}") from error
    tensors = {}
    for name, part in sorted(parts, key=lambda one: one[0]):
        dtype = _DTYPES.get(part["dtype"])
        if dtype is None:
            raise AdapterError(f"{_named(name)} has the type {part['dtype']}, not F32, F16 or BF16")
        try:
            array = mx.array(np.frombuffer(part["data"], dtype=dtype).reshape(part["shape"]))
        except (ValueError, OverflowError) as error:  # too many axes, or an empty one beside a huge
            raise AdapterError(f"{_named(name)}: {str(error).splitlines()[0]}") from error
        array = array.view(mx.bfloat16) if part["dtype"] == "BF16" else array
        tensors[name] = array.astype(mx.float32)
        if not mx.isfinite(tensors[name]).all().item():
            raise AdapterError(f"{_named(name)} has numbers that are not finite")
    return tensors


def _factors(
    tensors: Mapping[str, mx.array], config: LoraConfig, layers: Mapping[str, Shape]
) -> dict[str, Factors]:
    pattern = _PEFT_NAME if config.is_peft else _MLX_NAME
    matches = {name: pattern.fullmatch(name) for name in tensors}
    untrained = {
        match["layer"]
        for name, match in matches.items()
        if match and match["matrix"] in "bB" and not tensors[name].any().item()
    }
    found: defaultdict[str, dict[str, mx.array]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = matches[name]
        if match is None:
            raise AdapterError(f"{_named(name)} is not supported, only matrices of LoRA are")
        layer, matrix = _layer_name(match["layer"], layers), match["matrix"].lower()
        if layer is None and match["layer"] in untrained:
            continue  # as of layers that share the keys of others, which some models do not have
        if layer is None:
            raise AdapterError(
                f"the model has no linear layer {_named(match['layer'])} that an adapter could "
                "change"
            )
        if matrix in found[layer]:
            raise AdapterError(f"{_named(name)} is there twice")
        if tensor.ndim != 2:
            raise AdapterError(f"{_named(name)} is no matrix but {_shape(tensor)}")
        # PEFT stores weights of linear layers, which are the transposed matrices.
        found[layer][matrix] = tensor.T if config.is_peft else tensor
    if not found:
        raise AdapterError("no matrices")
    return {layer: _pair(layer, both, config, layers[layer]) for layer, both in found.items()}


def _pair(layer: str, both: Mapping[str, mx.array], config: LoraConfig, shape: Shape) -> Factors:
    for matrix, expected in (
        ("a", (shape.inputs, config.rank)),
        ("b", (config.rank, shape.outputs)),
    ):
        if matrix not in both:
            raise AdapterError(f"{layer} has no matrix {matrix.upper()}")
        if both[matrix].shape != expected:
            raise AdapterError(
                f"{layer}: matrix {matrix.upper()} has the shape {_shape(both[matrix])}, the model "
                f"and the rank need {expected[0]} x {expected[1]}"
            )
    b = both["b"] * config.scale
    if config.is_peft and shape.folded is not None:
        b = b * shape.folded
    return Factors(both["a"], b)


def _layer_name(name: str, layers: Mapping[str, Shape]) -> str | None:
    """The model's name of a layer, which has other names outside of its blocks in some formats.

    None: the model has no such layer, or it is not one of the language model.
    """
    if name in layers:
        return name
    inner = re.search(r"(?<=\.)\w+\.\d+\..+", f".{name}")
    if inner is None or _OTHER_PART.search(name.removesuffix(inner[0])):
        return None
    names = [known for known in layers if f".{known}".endswith(f".{inner[0]}")]
    return names[0] if len(names) == 1 else None


def _named(name: str) -> str:
    """A name of a file's author on one short line."""
    return repr(name[:120])


def _shape(array: mx.array) -> str:
    return " x ".join(map(str, array.shape))
