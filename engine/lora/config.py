"""An adapter's configuration, in mlx-lm's format or PEFT's; both call it adapter_config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.engine.errors import AdapterError

CONFIG = "adapter_config.json"
MLX_WEIGHTS, PEFT_WEIGHTS = "adapters.safetensors", "adapter_model.safetensors"
# A larger configuration is something else.
_MAX_BYTES = 1 << 20
# Scales beyond this make numbers infinite.
_MAX_SCALE = 1e4
# PEFT's fields that change nothing in a loaded adapter. A field that is neither here nor read below
# has to be empty, because later versions add fields that change the result.
_PEFT_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version"),
        # Written always, used only with use_qalora.
        "qalora_group_size",
        *("revision", "runtime_config", "target_modules", "task_type"),
    )
)
_PEFT_READ = frozenset(("bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "use_rslora"))
# These methods of initialization also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraConfig(NamedTuple):
    """The configuration of an adapter.

    Attributes:
        is_peft: the format of the weights: PEFT's, or mlx-lm's.
        rank: the width of its matrices.
        scale: a factor of their product.
        weights: the file's name.
    """

    is_peft: bool
    rank: int
    scale: float

    @property
    def weights(self) -> str:
        return PEFT_WEIGHTS if self.is_peft else MLX_WEIGHTS


def parse_config(path: Path, text: bytes) -> LoraConfig:
    """Parses an adapter_config.json.

    Raises:
        AdapterError: it is not one, or of an adapter that is not supported.
    """
    if len(text) > _MAX_BYTES:
        raise AdapterError(f"{path}: more than {_MAX_BYTES} bytes are no adapter's configuration")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: not a JSON object")
    try:
        return _peft(config) if "peft_type" in config else _mlx(config)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from None


def _mlx(config: dict[str, Any]) -> LoraConfig:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(f"fine_tune_type {_shown(kind)} is not supported, only 'lora'")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError("neither lora_parameters (mlx-lm) nor peft_type (PEFT) is there")
    scale = _number("lora_parameters.scale", parameters.get("scale"))
    return LoraConfig(False, _rank("lora_parameters.rank", parameters.get("rank")), scale)


def _peft(config: dict[str, Any]) -> LoraConfig:
    if config["peft_type"] != "LORA":
        raise AdapterError(f"peft_type {_shown(config['peft_type'])} is not supported, only LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError("a bias that was trained is not supported")
    initialization = config.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"init_lora_weights {_shown(initialization)} changes the base model, which is not "
            "supported; convert the adapter with PEFT"
        )
    for name, value in config.items():
        if value and name not in _PEFT_READ | _PEFT_HARMLESS:
            raise AdapterError(f"{_shown(name)} is not supported")
    scales_by_root = config.get("use_rslora", False)
    if type(scales_by_root) is not bool:
        raise AdapterError(f"use_rslora is {_shown(scales_by_root)}, neither true nor false")
    rank, alpha = _rank("r", config.get("r")), _number("lora_alpha", config.get("lora_alpha"))
    return LoraConfig(True, rank, alpha / (math.sqrt(rank) if scales_by_root else rank))


def _rank(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value < 1 << 16:
        raise AdapterError(f"{name} is {_shown(value)}, not a whole number above 0")
    return value


def _number(name: str, value: object) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= _MAX_SCALE
    ):
        raise AdapterError(f"{name} is {_shown(value)}, not a number up to {_MAX_SCALE:g}")
    return float(value)


def _shown(value: object) -> str:
    """A value on one short line."""
    return repr(value)[:80]
