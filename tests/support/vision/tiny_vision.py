"""Tiny random models of mlx-vlm."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from chairlift.engine.messages import Array, PromptImage
from chairlift.engine.model.vision.model import VisionModel

VOCAB_SIZE = 300
IMAGE_ID, START_ID, END_ID = 299, 298, 297

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
_QWEN: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "mlp_ratio": 2,
}
_LLAMA4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "mm_tokens_per_image": 4,
        },
        "vision_config": {**_SIGLIP, "model_type": "gemma3"},
        "image_token_index": IMAGE_ID,
        "hidden_size": 64,
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 0,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IMAGE_ID,
        "vocab_size": VOCAB_SIZE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "idefics3"},
        "image_token_id": IMAGE_ID,
        "image_token_index": IMAGE_ID,
        "scale_factor": 2,
        "vocab_size": VOCAB_SIZE,
    },
    "pixtral": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": IMAGE_ID,
        "vocab_size": VOCAB_SIZE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "qwen2_vl": {
        **_TEXT,
        "rope_scaling": _MROPE,
        "vision_config": {**_QWEN, "model_type": "qwen2_vl"},
        "image_token_id": IMAGE_ID,
        "video_token_id": 296,
        "vision_start_token_id": START_ID,
        "vision_end_token_id": END_ID,
    },
    "qwen2_5_vl": {
        **_TEXT,
        "rope_scaling": _MROPE,
        "vision_config": {
            **_QWEN,
            "model_type": "qwen2_5_vl",
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": IMAGE_ID,
        "video_token_id": 296,
        "vision_start_token_id": START_ID,
        "vision_end_token_id": END_ID,
    },
}
CONFIGS["smolvlm"] = CONFIGS["idefics3"]
_INTERNVL: dict[str, Any] = {
    "text_config": {**_TEXT, "model_type": "qwen3"},
    "vision_config": {**_SIGLIP, "model_type": "internvl_vision"},
    "downsample_ratio": 0.5,
    "image_token_id": IMAGE_ID,
    "image_token_index": IMAGE_ID,
}
CONFIGS["internvl"] = _INTERNVL
CONFIGS["internvl_chat"] = {
    **_INTERNVL,
    "text_config": {**_TEXT, "model_type": "qwen2"},
    "vision_config": {**_SIGLIP, "model_type": "intern_vit_6b"},
}
CONFIGS["mistral3"] = {
    **CONFIGS["pixtral"],
    "text_config": {**_TEXT, "model_type": "ministral3", "rope_parameters": _LLAMA4_ROPE},
    "spatial_merge_size": 2,
}
CONFIGS["qwen3_vl"] = {
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        **_QWEN,
        "model_type": "qwen3_vl",
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": IMAGE_ID,
    "image_token_index": IMAGE_ID,
    "video_token_id": 296,
    "video_token_index": 296,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
}
CONFIGS["qwen3_vl_moe"] = {
    **CONFIGS["qwen3_vl"],
    "text_config": {
        **CONFIGS["qwen3_vl"]["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "vision_config": {**CONFIGS["qwen3_vl"]["vision_config"], "model_type": "qwen3_vl_moe"},
}


def vlm_model(model_type: str, seed: int = 0) -> nn.Module:
    """A random instance of mlx-vlm's class in float32; the same seed gives the same weights."""
    model = _instance(model_type)
    model.update(tree_unflatten(_weights(model_type, seed)))
    model.eval()
    return model


@cache
def _weights(model_type: str, seed: int) -> list[tuple[str, mx.array]]:
    key = mx.random.key(seed)
    weights = []
    for name, old in tree_flatten(_instance(model_type).parameters()):
        key, sub = mx.random.split(key)
        noise = mx.random.normal(old.shape, key=sub)
        if "norm" in name:
            new = 0.2 * noise + (0.0 if model_type == "gemma3" else 1.0)
        elif name.endswith("bias"):
            new = 0.3 * noise
        else:
            fan_in = old.size // old.shape[0] if old.ndim > 1 else 1
            new = noise * (1.5 / fan_in**0.5)
        weights.append((name, new))
    mx.eval([weight for _, weight in weights])
    return weights


def _instance(model_type: str) -> nn.Module:
    """An instance whose weights are not evaluated."""
    from mlx_vlm.utils import update_module_configs

    package = importlib.import_module(f"mlx_vlm.models.{model_type}")
    config = {"model_type": model_type, **CONFIGS[model_type]}
    parsed = package.ModelConfig.from_dict(config)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    parsed = update_module_configs(parsed, package, config, modules)
    model: nn.Module = package.Model(parsed)
    return model


def vision_model(model_type: str, seed: int = 0) -> VisionModel:
    """The same as the engine calls it."""
    return VisionModel(vlm_model(model_type, seed), model_type)


def solo_tokens(
    model: Any, prompt: list[int], images: tuple[PromptImage, ...], count: int
) -> list[int]:
    """The greedy tokens of mlx-vlm's own ``generate_step``, with its own caches, alone."""
    return [token for token, _ in _steps(model, prompt, images, count)]


def solo_logprobs(
    model: Any, prompt: list[int], images: tuple[PromptImage, ...], tokens: list[int]
) -> list[float]:
    """The log-probabilities of its greedy tokens, which are ``tokens``."""
    steps = list(_steps(model, prompt, images, len(tokens)))
    assert [token for token, _ in steps] == tokens
    return [float(logprobs[token].item()) for token, logprobs in steps]


def _steps(
    model: Any, prompt: list[int], images: tuple[PromptImage, ...], count: int
) -> Iterator[tuple[int, mx.array]]:
    from mlx_vlm.generate.ar import generate_step

    tokens = mx.array([prompt])
    arrays: dict[str, mx.array] = {}
    for name in images[0].arrays if images else ():
        parts = [numpy_of(image.arrays[name]) for image in images]
        # idefics3's processor puts the tiles of all images side by side.
        tiles = "pixel_attention_mask" in images[0].arrays
        arrays[name] = mx.array(np.concatenate(parts, axis=1 if tiles else 0))
    pixels = arrays.pop("pixel_values", None)
    mask = mx.ones(tokens.shape, mx.int32)
    # NOTE: where a text sets none, mlx-vlm would use those of the prompt before.
    if hasattr(model.language_model, "_rope_deltas"):
        model.language_model._rope_deltas = None
    steps = generate_step(tokens, model, pixels, mask, max_tokens=count, temperature=0.0, **arrays)
    for token, logprobs in steps:
        yield int(token), logprobs


def numpy_of(array: Array) -> np.ndarray[Any, Any]:
    """A message's array."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)
