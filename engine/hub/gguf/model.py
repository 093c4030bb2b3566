"""Loads a GGUF file's tensors into mlx-lm's model classes; keeps quantization that MLX supports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3
from mlx_lm.models.rope_utils import initialize_rope

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.gguf.affine import GROUP, pack_affine, packed_bits
from chairlift.engine.hub.gguf.config import model_config
from chairlift.engine.hub.gguf.file import GGUFFile, GGUFTensor
from chairlift.engine.messages import Loading, OnProgress

_MODULES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma3_text": gemma3_text}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Frequency factors of Llama 3; they become its rope_scaling instead of a parameter.
_ROPE_FACTORS = "rope_freqs.weight"

_FLOATING = {GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.F64}
_PROGRESS_SECONDS = 0.5
_ROW_BYTES = 8192  # of rows that are dequantized together


def own_dtype(file: GGUFFile) -> mx.Dtype:
    """The type to compute in on an accelerator, unless the operator configures one.

    float16 represents the block scales of quantized files exactly, but only llama's activations
    stay in its range. Other models get bfloat16, which rounds a scale by 0.2 %, less than the
    quantization's own error.
    """
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types == {GGMLType.F32}:
        return mx.float32
    if GGMLType.BF16 in types or file.get("general.architecture", str, "") != "llama":
        return mx.bfloat16
    return mx.float16


def is_quantized(file: GGUFFile) -> bool:
    """Whether any tensor has a quantized type."""
    return not {tensor.type for tensor in file.tensors.values()} <= _FLOATING


def build_model(
    file: GGUFFile, *, keep_quantized: bool, dtype: mx.Dtype, on_progress: OnProgress
) -> tuple[Module, dict[str, Any]]:
    """Builds mlx-lm's model with the file's weights; returns it with its configuration.

    Args:
        keep_quantized: blocks of the types in ``affine`` become MLX's affine groups of 32, with the
            same values (exactly, if ``dtype`` is float32 or float16). All others are dequantized.
        dtype: the type of floating-point parameters, and of the scales and biases of quantized
            ones.

    Raises:
        ModelError: metadata or tensors are missing or do not fit together.
        UnsupportedModel: the architecture or a tensor is not supported.
    """
    config = model_config(file)
    if _ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    weights: dict[str, mx.array] = {}
    kept: dict[str, int] = {}
    done, total = 0, sum(tensor.n_bytes for tensor in file.tensors.values())
    next_report = time.monotonic()
    for tensor, name in _named_tensors(file, config):
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _PROGRESS_SECONDS
            on_progress(Loading("loading weights", done, total))
        rows = file.raw(tensor)
        if config["model_type"] == "llama":
            rows = _unpermute(file, rows, name, config)
        bits = packed_bits(tensor.type, dtype) if keep_quantized else None
        if bits is not None and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            kept[module] = bits
            packed, scales, biases = pack_affine(rows, tensor.type)
            new = {name: packed}
            new[f"{module}.scales"] = scales.astype(dtype)
            new[f"{module}.biases"] = biases.astype(dtype)
        else:
            values = _dequantize(file, tensor, rows)
            if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
                values = values - 1.0  # llama.cpp's norms multiply by w, Gemma's by 1 + w
            new = {name: mx.array(values).astype(dtype)}
        mx.eval(new)  # now, so that only one tensor at a time exists twice
        weights |= new
        done += tensor.n_bytes
    on_progress(Loading("loading weights", total, total))
    return _assemble(file, config, weights, kept), config


def _named_tensors(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[GGUFTensor, str]]:
    """Yields each tensor that becomes a parameter, with the parameter's name."""
    layer_names = _GEMMA3_LAYER_NAMES if config["model_type"] == "gemma3_text" else _LAYER_NAMES
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FACTORS:
            continue
        stem, _, suffix = tensor.name.rpartition(".")
        match = _LAYER_TENSOR.fullmatch(tensor.name)
        if match and match[2] in layer_names:
            yield tensor, f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        elif stem in _TOP_NAMES and suffix == "weight":
            yield tensor, f"{_TOP_NAMES[stem]}.weight"
        else:
            raise UnsupportedModel(
                f"{file.path}: tensor {tensor.name} has no place in a {config['model_type']} model"
            )


def _unpermute(
    file: GGUFFile, rows: npt.NDArray[np.uint8], name: str, config: dict[str, Any]
) -> npt.NDArray[np.uint8]:
    """Undoes GGUF's interleaving of llama's RoPE pairs: within a head, rows 0 2 4 … 1 3 5 …."""
    if name.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return rows
    if rows.shape[0] != heads * config["head_dim"]:
        raise ModelError(f"{file.path}: tensors do not match the metadata: {name}")
    by_head = rows.reshape(heads, config["head_dim"] // 2, 2, rows.shape[1])
    return by_head.swapaxes(1, 2).reshape(rows.shape)


def _dequantize(
    file: GGUFFile, tensor: GGUFTensor, rows: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    try:
        values: npt.NDArray[np.float32] = gguf.dequantize(_long_rows(rows), tensor.type)
    except NotImplementedError:
        raise UnsupportedModel(
            f"{file.path}: tensor {tensor.name} has type {tensor.type.name}, "
            "which cannot be dequantized"
        ) from None
    return values.reshape(tensor.shape)


def _long_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same bytes in fewer rows. gguf takes 16 at a time, twice as fast if they are long."""
    count, width = rows.shape
    joined = max(1, _ROW_BYTES // width)
    while count % joined:
        joined -= 1
    return rows.reshape(count // joined, joined * width)


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rope_scaling with the file's factor, if its frequencies are the file's."""
    tensor = file.tensors[_ROPE_FACTORS]
    factors = _dequantize(file, tensor, file.raw(tensor)).reshape(-1)
    dims, base = config["head_dim"], config["rope_theta"]
    if config["model_type"] != "llama" or factors.size != dims // 2:
        raise UnsupportedModel(f"{file.path}: {_ROPE_FACTORS} does not fit the model")
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = base ** (np.arange(0, dims, 2) / dims) * factors
    frequencies = np.array(initialize_rope(dims, base, False, scaling)._freqs)
    if not np.allclose(frequencies, expected, rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: {_ROPE_FACTORS} is not Llama 3's scaling")
    return scaling


def _assemble(
    file: GGUFFile, config: dict[str, Any], weights: dict[str, mx.array], kept: dict[str, int]
) -> Module:
    module = _MODULES[config["model_type"]]
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    weights = model.sanitize(weights)

    def quantization(path: str, _: Module) -> bool | dict[str, int]:
        return {"group_size": GROUP, "bits": kept[path]} if path in kept else False

    if kept:
        quantize(model, class_predicate=quantization)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise ModelError(f"{file.path}: tensors do not match the metadata: {cause}") from error
    model.eval()
    return model
