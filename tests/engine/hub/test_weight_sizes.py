"""The memory of a model's weights, estimated from its files before it is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf.constants import GGMLQuantizationType as GGMLType
from mlx.utils import tree_flatten
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import VOCAB_SIZE, TinyKind, tiny_model, tiny_model_dir

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.model import build_model
from chairlift.engine.hub.source import resolve
from chairlift.engine.hub.weights import weight_size
from chairlift.engine.messages import silent
from chairlift.engine.model.loader import load_model


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "lfm2"])
def test_a_directory_takes_what_was_estimated(tmp_path: Path, kind: TinyKind, dtype: str) -> None:
    source = resolve(str(tiny_model_dir(tmp_path, kind)))
    estimate = weight_size(source, dtype, on_cpu=True)
    loaded = load_model(source, dtype, silent)
    assert estimate.vocabulary == VOCAB_SIZE
    assert loaded.weight_bytes <= estimate.bytes <= 1.1 * loaded.weight_bytes


@pytest.mark.parametrize(
    ("mode", "bits", "group", "quantization"),
    [
        ("affine", 4, 32, {"bits": 4, "group_size": 32}),
        ("affine", 3, 64, {"bits": 3, "group_size": 64}),
        # The default of a mixed quantization; mlx-lm finds the others by their shapes.
        ("affine", 4, 32, {"bits": 8, "group_size": 32}),
        ("mxfp4", 4, 32, None),
        ("mxfp8", 8, 32, None),
        ("nvfp4", 4, 16, {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    ],
)
def test_quantized_weights_take_what_was_estimated(
    tmp_path: Path, mode: str, bits: int, group: int, quantization: dict[str, Any] | None
) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group, bits, mode=mode)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((path / "config.json").read_text())
    foreign = {"quantization_config": {"quant_method": mode}}
    config |= foreign if quantization is None else {"quantization": quantization}
    (path / "config.json").write_text(json.dumps(config))
    estimate = weight_size(resolve(str(path)), "auto", on_cpu=True)
    loaded = load_model(resolve(str(path)), "auto", silent)
    assert loaded.weight_bytes <= estimate.bytes <= 1.2 * loaded.weight_bytes


def test_a_quantization_that_is_no_object_does_not_matter(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    estimate = weight_size(resolve(str(path)), "auto", on_cpu=True)
    config = json.loads((path / "config.json").read_text())
    for changes in ({"quantization": "4bit"}, {"quantization_config": "awq"}):
        (path / "config.json").write_text(json.dumps(config | changes))
        assert weight_size(resolve(str(path)), "auto", on_cpu=True) == estimate


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0])
def test_a_gguf_file_takes_what_was_estimated(tmp_path: Path, type_: GGMLType) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE), type_)
    source = resolve(str(path))
    estimate = weight_size(source, "auto", on_cpu=True)
    loaded = load_model(source, "auto", silent)
    assert estimate.vocabulary == GGUF_VOCAB_SIZE
    assert loaded.weight_bytes <= estimate.bytes <= 1.1 * loaded.weight_bytes


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 1 << 62), struct.pack("<Q", 4) + b"nope", b"\x02" + bytes(9)],
)
def test_a_damaged_header_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged or truncated") as error:
        weight_size(resolve(str(path)), "auto", on_cpu=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0])
def test_an_accelerator_keeps_the_blocks_of_a_gguf_file(tmp_path: Path, type_: GGMLType) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE), type_)
    model, _ = build_model(
        GGUFFile(path), keep_quantized=True, dtype=mx.float16, on_progress=silent
    )
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    estimate = weight_size(resolve(str(path)), "auto", on_cpu=False).bytes
    assert size <= estimate <= 1.1 * size
