"""The headers of a model's files: the memory that its weights will take, and their places."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGMLQuantizationType

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import WEIGHTS, damaged_file, read_config, text_config
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.source import ModelSource

# Longer headers of safetensors files are damaged; the format's own limit.
_MAX_HEADER = 100 << 20
# Blocks that stay quantized on accelerators, by their bits: groups with a scale and a bias each.
_KEPT_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}
_GROUP = 32
# MLX's widths of quantized weights, and the weights that may share a scale, most first.
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
# The same of mxfp4, mxfp8 and nvfp4, whose scales have 8 bits.
_FLOAT_BITS = (4, 8)
_FLOAT_GROUPS = (32, 16)
_FLOATS = {"F16": 2, "BF16": 2, "F32": 4}


class WeightSize(NamedTuple):
    """The bytes of a model's weights in memory, and the width of its logits (0: not known)."""

    bytes: int
    vocabulary: int


def weight_size(source: ModelSource, dtype: str, on_cpu: bool) -> WeightSize:
    """The memory of the weights, before they are loaded.

    It is an upper bound: on CPUs with bfloat16 units some weights take half of it, and quantized
    ones take a third with compiled kernels.

    Args:
        source: the model on disk.
        dtype: see ``EngineConfig.dtype``.
        on_cpu: whether the engine computes on the CPU, where ``auto`` is float32.

    Raises:
        ModelError: the files cannot be read.
    """
    is_float32 = dtype == "float32" or (on_cpu and dtype == "auto")
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        types = {tensor.type for tensor in file.tensors.values()}
        own = dtype == "auto" and types == {GGMLQuantizationType.F32}
        return _gguf_size(file, 4 if is_float32 or own else 2, keeps_blocks=not on_cpu)
    config = read_config(source.path)
    width = None if dtype == "auto" and not on_cpu else 4 if is_float32 else 2
    tensors = {
        name: tensor
        for shard in sorted(source.path.glob(WEIGHTS))
        for name, _, tensor in _placed(shard)
    }
    unpacked = on_cpu and is_float32
    total = sum(
        _unpacked_values(name, tensors, config) * 4 or _tensor_bytes(tensor, 4)
        if unpacked
        else _tensor_bytes(tensor, width)
        for name, tensor in tensors.items()
    )
    return WeightSize(total, _vocabulary(config))


def tensor_places(source: ModelSource) -> dict[Path, list[int]]:
    """The positions of the first byte of each tensor, by file.

    Files that no text model is loaded from are included, but not read: they have no positions.

    Raises:
        ModelError: a file cannot be read.
    """
    if source.kind == "gguf":
        return {source.path: [one.start for one in GGUFFile(source.path).tensors.values()]}
    return {
        path: [begin + int(tensor["data_offsets"][0]) for _, begin, tensor in _placed(path)]
        if path.match(WEIGHTS)
        else []
        for path in sorted(source.path.glob("*.safetensors"))
    }


def _gguf_size(file: GGUFFile, width: int, keeps_blocks: bool) -> WeightSize:
    total = 0
    for tensor in file.tensors.values():
        values = math.prod(tensor.shape)
        bits = _KEPT_BITS.get(tensor.type) if keeps_blocks else None
        total += values * width if bits is None else values // _GROUP * (4 * bits + 2 * width)
    return WeightSize(total, len(file.get("tokenizer.ggml.tokens", list, [])))


def _tensor_bytes(tensor: Mapping[str, Any], width: int | None) -> int:
    """The bytes of one tensor in memory; ``width``: of its floating-point numbers, if given."""
    stored = _stored(tensor)
    if tensor["dtype"].startswith("F8_"):  # mlx-lm makes bfloat16 of them
        return stored * (width or 2)
    own = _FLOATS.get(tensor["dtype"])
    return stored if width is None or own is None else stored // own * width


def _unpacked_values(
    name: str, tensors: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]
) -> int:
    """An upper bound of the weights that are packed in a tensor; 0 if none are."""
    tensor = tensors[name]
    stored = _stored(tensor)
    if name.endswith((".qweight", "_blocks")):  # AWQ; gpt-oss
        return stored * 2
    scales = tensors.get(f"{name.removesuffix('.weight')}.scales")
    groups: int = math.prod(scales["shape"]) if scales else 0
    if tensor["dtype"] != "U32" or scales is None or not groups:
        return 0
    quantization = config.get("quantization")
    own = quantization.get("group_size") if isinstance(quantization, dict) else None
    # One number is the bits of a weight times the weights of a group.
    is_affine = scales["dtype"] != "U8"
    sizes, widths = ((own, *_GROUPS), _BITS) if is_affine else (_FLOAT_GROUPS, _FLOAT_BITS)
    for group in sizes:
        if isinstance(group, int) and group > 0 and stored * 8 / groups / group in widths:
            return groups * group
    return 0


def _stored(tensor: Mapping[str, Any]) -> int:
    start, end = tensor["data_offsets"]
    return int(end) - int(start)


def _placed(shard: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """The names and entries of a safetensors file's header, with the position they count from."""
    try:
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError
            header = json.loads(file.read(length))
        yield from (
            (name, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"
        )
    except OSError as error:
        raise ModelError(f"{shard}: cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, AttributeError) as error:
        raise damaged_file(shard, "damaged or truncated: it has no header") from error


def _vocabulary(config: Mapping[str, Any]) -> int:
    for part in (config, text_config(config)):
        size = part.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return 0
