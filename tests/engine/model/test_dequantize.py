"""Models of every quantization are dequantized to float32 on the CPU, with all of their scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config

from chairlift.engine.cpu.kernels import _dequantize_others
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
}
# The error of a mode's blocks, as a part of the largest weight.
TOLERANCE = {"affine": 0.2, "mxfp8": 0.1, "mxfp4": 0.25, "nvfp4": 0.25}


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def _model() -> Any:
    mx.random.seed(1)
    return qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))


def _source(path: Path, mode: str, global_scale: bool) -> ModelSource:
    model, config = quantize_model(
        _model(), CONFIG, None, None, mode=mode, global_scale=global_scale
    )
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    save_config(config, path / "config.json")
    return ModelSource("m", "directory", path)


@pytest.mark.parametrize(
    ("mode", "global_scale"),
    [("affine", False), ("mxfp8", False), ("mxfp4", False), ("nvfp4", False), ("nvfp4", True)],
)
@pytest.mark.parametrize("kept", [False, True])
def test_weights_are_float32_and_close_to_those_that_were_quantized(
    tmp_path: Path, mode: str, global_scale: bool, kept: bool
) -> None:
    source = _source(tmp_path, mode, global_scale)
    loaded = load_model(source, "auto", keep_quantized=lambda size, group: kept)
    assert loaded.dtype == "float32"
    if kept:
        _dequantize_others(loaded.model)
    original = dict(tree_flatten(_model().parameters()))
    for path, layer in loaded.model.named_modules():
        if isinstance(layer, nn.QuantizedLinear) or "weight" not in layer or "scales" in layer:
            continue
        expected = original[f"{path}.weight"]
        assert layer.weight.dtype == mx.float32
        assert mx.abs(layer.weight - expected).max() < TOLERANCE[mode] * mx.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scales_of_experts_stay_float32(tmp_path: Path, dtype: str) -> None:
    loaded = load_model(_source(tmp_path, "nvfp4", True), dtype)
    experts = loaded.model.layers[0].mlp.switch_mlp.up_proj
    assert experts.global_scale.dtype == mx.float32
    assert loaded.dtype == dtype
