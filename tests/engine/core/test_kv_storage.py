"""Keys and values take 16 bits each if the model's files have numbers of 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.tiny import tiny_model, tiny_model_dir

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.quantized import HalfLayer, HalfPrecision, Quantization
from chairlift.engine.config import EngineConfig
from chairlift.engine.core.start import kv_storage, serve_loaded
from chairlift.engine.cpu import host_linear
from chairlift.engine.cpu.compiled import compiled_matmul
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model


@pytest.mark.parametrize(
    ("settings", "half", "expected"),
    [
        ({}, True, HalfPrecision()),
        ({}, False, None),
        ({"dtype": "float32"}, True, None),
        ({"kv_bits": 8, "kv_group_size": 32}, True, Quantization(8, 32)),
    ],
)
def test_the_configuration_decides(settings: dict[str, Any], half: bool, expected: object) -> None:
    assert kv_storage(EngineConfig(**settings), half) == expected


@pytest.mark.skipif(not compiled_matmul.available(), reason="llvmlite is not installed")
@pytest.mark.parametrize(
    ("files", "asked", "kind"),
    [
        (mx.bfloat16, "auto", HalfLayer),
        (mx.float16, "auto", HalfLayer),
        (mx.bfloat16, "float32", LayerCache),
        (mx.float32, "auto", LayerCache),
    ],
)
def test_models_of_16_bits_have_keys_and_values_of_16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: mx.Dtype, asked: str, kind: type
) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    path = tiny_model_dir(tmp_path, "llama")
    model = tiny_model("llama", head_dim=32)
    model.set_dtype(files)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config_path = path / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"head_dim": 32}))
    loaded = load_model(ModelSource("tiny", "directory", path), asked)
    config = EngineConfig(max_rows=2, kv_memory=1 << 24, dtype=asked, prefix_cache_bytes=0)
    core, info = serve_loaded(config, loaded, lambda progress: None)
    band = core.batch.bands[0]
    assert isinstance(band, BatchCache)
    assert {type(layer) for layer in band.parts} == {kind}
    heads = loaded.config["num_key_value_heads"] * loaded.config["num_hidden_layers"]
    assert info.kv_bytes_per_token == 2 * heads * 32 * (2 if kind is HalfLayer else 4)
