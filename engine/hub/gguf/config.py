"""Converts a GGUF file's metadata to the configuration that mlx-lm reads from config.json."""

from __future__ import annotations

from typing import Any

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.folder_check import MAX_LAYERS
from chairlift.engine.hub.gguf.file import GGUFFile

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# llama.cpp's defaults for missing keys.
_ROPE_BASE = 10_000.0
_YARN_BETA_FAST, _YARN_BETA_SLOW = 32.0, 1.0
_GEMMA3_LOCAL_ROPE_BASE = 10_000.0
_GEMMA3_PATTERN = 6
# Gemma 3 27B has this many layers. It alone scales attention by the hidden size per head instead of
# the head's dimension.
_GEMMA3_27B_LAYERS = 62


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The configuration for mlx-lm's model classes, including "model_type" and "head_dim".

    Llama 3's frequency factors are a tensor, which ``gguf.model`` reads.

    Raises:
        ModelError: a metadata key is missing or of the wrong type.
        UnsupportedModel: the architecture, or a variant of it, is not supported.
    """
    arch = file.require("general.architecture", str)
    if arch not in _MODEL_TYPES:
        raise UnsupportedModel(
            f"{file.path}: architecture {arch!r} is not supported for GGUF files "
            f"(supported: {', '.join(_MODEL_TYPES)})"
        )
    if file.get(f"{arch}.expert_count", int, 0) > 0:
        raise UnsupportedModel(f"{file.path}: mixture-of-experts GGUF files are not supported")
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModel(f"{file.path}: it has no tensor token_embd.weight")
    hidden = file.require(f"{arch}.embedding_length", int)
    layers = file.require(f"{arch}.block_count", int)
    if not 0 < layers <= MAX_LAYERS:
        raise ModelError(f"{file.path}: damaged, {arch}.block_count is {layers}")
    heads = _per_layer(file, f"{arch}.attention.head_count")
    if heads <= 0:
        raise UnsupportedModel(f"{file.path}: {arch}.attention.head_count is {heads}")
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads)
    _check_heads(file, arch, hidden, heads, head_dim)
    kv_key = f"{arch}.attention.head_count_kv"
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES[arch],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _per_layer(file, f"{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _per_layer(file, kv_key) if kv_key in file.metadata else heads,
        "head_dim": head_dim,
        "rms_norm_eps": file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": file.require(f"{arch}.context_length", int),
        "rope_theta": file.get(f"{arch}.rope.freq_base", float, _ROPE_BASE),
        "rope_scaling": _rope_scaling(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if arch == "gemma3":
        config |= _gemma3_extras(file, hidden, heads, head_dim)
    return config


def _per_layer(file: GGUFFile, key: str) -> int:
    """A number that GGUF may give once or per layer. mlx-lm's classes have one for all layers."""
    value = file.metadata.get(key)
    if isinstance(value, list) and len(set(value)) == 1 and isinstance(value[0], int):
        return value[0]
    if isinstance(value, list):
        raise UnsupportedModel(f"{file.path}: {key} differs from layer to layer")
    return file.require(key, int)


def _check_heads(file: GGUFFile, arch: str, hidden: int, heads: int, head_dim: int) -> None:
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if file.get(key, int, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{file.path}: {key} {file.metadata[key]} differs from the head's {head_dim}"
            )
    if arch == "qwen2" and head_dim != hidden // heads:
        raise UnsupportedModel(f"{file.path}: qwen2 with heads of {head_dim} is not supported")


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    factor = file.get(f"{arch}.rope.scaling.factor", float, 0.0)
    legacy = file.get(f"{arch}.rope.scale_linear", float, 0.0)
    kind = file.get(f"{arch}.rope.scaling.type", str, "linear" if factor or legacy else "none")
    factor = factor or legacy or 1.0
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        key = f"{arch}.rope.scaling.{name}"
        if file.get(key, float, 1.0) != 1.0:
            raise UnsupportedModel(f"{file.path}: {key} {file.metadata[key]:g} is not supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    # Not for gemma3: its local layers must not be scaled, and YaRN files do not say that.
    if kind == "yarn" and arch != "gemma3":
        original = file.require(f"{arch}.rope.scaling.original_context_length", int)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": file.get(f"{arch}.rope.scaling.yarn_beta_fast", float, _YARN_BETA_FAST),
            "beta_slow": file.get(f"{arch}.rope.scaling.yarn_beta_slow", float, _YARN_BETA_SLOW),
        }
    raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r} is not supported for {arch}")


def _gemma3_extras(file: GGUFFile, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    for key in ("gemma3.final_logit_softcapping", "gemma3.attn_logit_softcapping"):
        if file.get(key, float, 0.0) > 0:
            raise UnsupportedModel(f"{file.path}: {key} is not supported")
    layers = file.require("gemma3.block_count", int)
    return {
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "rope_local_base_freq": file.get(
            "gemma3.rope.freq_base_swa", float, _GEMMA3_LOCAL_ROPE_BASE
        ),
        "sliding_window": file.require("gemma3.attention.sliding_window", int),
        "sliding_window_pattern": _gemma3_pattern(file),
    }


def _gemma3_pattern(file: GGUFFile) -> int:
    """The distance from one global layer to the next; a file may list all layers instead."""
    key = "gemma3.attention.sliding_window_pattern"
    value = file.metadata.get(key)
    if not isinstance(value, list):
        pattern = file.get(key, int, _GEMMA3_PATTERN)
        if pattern <= 0:
            raise UnsupportedModel(f"{file.path}: {key} {pattern} is not supported")
        return pattern
    is_local = [bool(local) for local in value]
    pattern = is_local.index(False) + 1 if False in is_local else len(is_local) + 1
    if is_local != [(i + 1) % pattern != 0 for i in range(len(is_local))]:
        raise UnsupportedModel(f"{file.path}: {key} is not a regular pattern")
    return pattern
