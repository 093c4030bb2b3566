"""Random LoRA adapters for tiny models, in mlx-lm's format and in PEFT's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.engine.lora.low_rank import dimensions, is_linear

Tensors = dict[str, mx.array]


def matrices(
    model: Any,
    seed: int,
    rank: int = 4,
    suffixes: tuple[str, ...] = ("proj",),
    is_changed: Callable[[str], bool] = lambda name: True,
    size: float = 0.5,
) -> dict[str, tuple[mx.array, mx.array]]:
    """Random matrices A ``[inputs, rank]`` and B ``[rank, outputs]`` that change the tokens.

    Args:
        suffixes: the last parts of the names of the layers that are changed.
        is_changed: further selects layers by their whole name.
    """
    key = mx.random.key(seed)
    found = {}
    for name, layer in model.named_modules():
        if not (name.endswith(suffixes) and is_linear(layer) and is_changed(name)):
            continue
        inputs, outputs = dimensions(layer)
        key, first, second = mx.random.split(key, 3)
        a = mx.random.normal((inputs, rank), key=first) / inputs**0.5
        found[name] = a, mx.random.normal((rank, outputs), key=second) * size
    return found


def write_mlx(
    folder: Path, pairs: dict[str, tuple[mx.array, mx.array]], scale: float = 1.0, **config: Any
) -> Path:
    """Writes what ``mlx_lm.lora`` writes; ``config`` replaces fields of the configuration."""
    tensors = {
        f"{name}.lora_{m}": t for name, ab in pairs.items() for m, t in zip("ab", ab, strict=True)
    }
    rank = next(iter(pairs.values()))[0].shape[1]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(_keys(pairs))}
    whole = {"fine_tune_type": "lora", "num_layers": 64, "lora_parameters": parameters}
    return write(folder, "adapters.safetensors", tensors, whole | config)


def write_peft(
    folder: Path, pairs: dict[str, tuple[mx.array, mx.array]], alpha: float = 0.0, **config: Any
) -> Path:
    """Writes what ``save_pretrained`` of PEFT 0.19 writes; the scale is 1 by default."""
    rank = next(iter(pairs.values()))[0].shape[1]
    tensors = {
        f"base_model.model.{name}.lora_{m}.weight": mx.contiguous(t.T)
        for name, ab in pairs.items()
        for m, t in zip("AB", ab, strict=True)
    }
    whole = {
        **{"peft_type": "LORA", "r": rank, "lora_alpha": alpha or rank, "bias": "none"},
        **{"target_modules": sorted(_keys(pairs)), "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
        **{"modules_to_save": None, "use_dora": False, "use_rslora": False, "rank_pattern": {}},
        **{"base_model_name_or_path": "x/y", "inference_mode": True, "fan_in_fan_out": False},
        **{"runtime_config": {"ephemeral_gpu_offload": False}, "init_lora_weights": True},
        **{"megatron_core": "megatron.core", "peft_version": "0.19.1", "lora_bias": False},
        **{"qalora_group_size": 16, "use_qalora": False, "use_bdlora": None, "loftq_config": {}},
    }
    return write(folder, "adapter_model.safetensors", tensors, whole | config)


def write(folder: Path, name: str, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / name), tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _keys(pairs: dict[str, tuple[mx.array, mx.array]]) -> set[str]:
    """The layers' names within their blocks, as both configurations have them."""
    return {name.partition("layers.")[2].partition(".")[2] for name in pairs}
