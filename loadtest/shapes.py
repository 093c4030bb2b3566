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
from mlx.nn.layers.quantized import quantize
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
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
        "sliding_window": 128,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
}
SCALE = 0.02
# Columns of a quantized weight that share a scale.
GROUP = 64


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
    bits: int | None = None,
    seed: int = 0,
    shard: Callable[[Any], None] | None = None,
    rank: int = 0,
) -> Any:
    """Builds one of mlx-lm's models with random weights.

    Args:
        bits: quantizes the weights of linear layers, embeddings and experts; None: not at all.
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
    if bits is not None:
        # Only the structure: no weight is computed before its random values replace it.
        quantize(model, GROUP, bits, class_predicate=_is_quantizable)
    whole: Any = dict(tree_flatten(model.parameters()))
    shapes = {name: array.shape for name, array in whole.items()}
    if shard is not None:
        shard(model)
    parameters: Any = tree_flatten(model.parameters())
    weights = []
    for name, old in parameters:
        part = rank if old.shape != shapes[name] else 0
        key = mx.random.key(crc32(f"{seed} {part} {name}".encode()))
        weights.append((name, _random(name, old, dtype, bits, key)))
        mx.eval(weights[-1][1])  # now, so that only one of them exists twice
    model.update(tree_unflatten(weights))
    model.eval()
    return model


def _is_quantizable(name: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0


def _random(name: str, old: mx.array, dtype: mx.Dtype, bits: int | None, key: mx.array) -> mx.array:
    """Random numbers in the place of ``old``, with which activations keep their size."""
    if bits is not None and old.dtype == mx.uint32:
        # NOTE: from a larger range, MLX draws numbers whose low bits are 0.
        halves = mx.random.randint(0, 1 << 16, (*old.shape, 2), mx.uint16, key=key)
        return halves.view(mx.uint32).squeeze(-1)
    noise = mx.random.normal(old.shape, dtype, scale=SCALE, key=key)
    if bits is not None and name.endswith("scales"):
        # A weight is a number of ``bits`` bits times the scale, plus the bias.
        return (noise + 1) * (4 * SCALE / (1 << bits))
    if bits is not None and name.endswith("biases"):
        return (noise - 1) * (2 * SCALE * (1 - 0.5**bits))
    return noise + 1 if "norm" in name else noise


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
