"""Random models in the shapes of well-known ones, random adapters, and random requests.

Speed does not depend on the values of the weights, so an engine can be measured without access to a
model hub.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten, tree_unflatten

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}
SCALE = 0.02


def config_of(shape: str) -> dict[str, Any]:
    """The config of a shape of ``SHAPES``, or of a ``config.json`` file.

    Raises:
        ValueError: ``shape`` is neither a known name nor a readable config.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    try:
        config = json.loads(Path(shape).read_text())
    except (OSError, ValueError) as error:
        known = ", ".join(SHAPES)
        raise ValueError(f"{shape} is neither one of {known} nor a config.json: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{shape} names no model_type")
    return config


def random_model(
    config: dict[str, Any],
    dtype: mx.Dtype,
    seed: int = 0,
    shard: Callable[[Any], None] | None = None,
    rank: int = 0,
) -> Any:
    """Builds one of mlx-lm's models with random weights.

    Args:
        shard: keeps one rank's part of the model. No more than that is ever computed.
        rank: the number of that rank. Weights that all ranks have whole are the same on all.

    Raises:
        ValueError: mlx-lm has no such model type.
    """
    try:
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    except ImportError as error:
        raise ValueError(f"mlx-lm has no model type {config['model_type']}") from error
    model: Any = module.Model(module.ModelArgs.from_dict(config))
    whole: Any = dict(tree_flatten(model.parameters()))
    shapes = {name: array.shape for name, array in whole.items()}
    if shard is not None:
        shard(model)
    parameters: Any = tree_flatten(model.parameters())
    weights = []
    for name, old in parameters:
        part = rank if old.shape != shapes[name] else 0
        key = mx.random.key(crc32(f"{seed} {part} {name}".encode()))
        new = mx.random.normal(old.shape, dtype, scale=SCALE, key=key)
        weights.append((name, new + 1 if "norm" in name else new))
        mx.eval(weights[-1][1])  # now, so that only one of them exists twice
    model.update(tree_unflatten(weights))
    model.eval()
    return model


def random_adapter(model: Any, folder: Path, rank: int, seed: int) -> Path:
    """Writes a LoRA adapter of all linear layers but the output layer, in mlx-lm's format."""
    folder.mkdir()
    key = mx.random.key(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and not name.endswith("lm_head"):
            outputs, inputs = layer.weight.shape
            for matrix, shape in (("a", (inputs, rank)), ("b", (rank, outputs))):
                key, sub = mx.random.split(key)
                noise = mx.random.normal(shape, layer.weight.dtype, key=sub)
                tensors[f"{name}.lora_{matrix}"] = noise * shape[0] ** -0.5
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": 0.1}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
