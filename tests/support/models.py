"""Models on disk: the default model, and tiny GGUF files with the weights of ``support.tiny``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType
from mlx.utils import tree_flatten
from support.tiny import (
    BYTES,
    CHAT_TEMPLATE,
    IM_END_ID,
    SPECIALS,
    VOCAB_SIZE,
    TinyKind,
    tiny_config,
    tiny_model,
)

from chairlift.engine.hub.fetch import fetch_default_model
from chairlift.engine.hub.gguf.file import GGUFFile

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA3_STEMS = _STEMS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# GGUF's writer omits empty arrays, so the tokenizer has one merge and its token.
MERGED = "th"
GGUF_VOCAB_SIZE = VOCAB_SIZE + 1


def default_model_path() -> Path:
    """The file of SmolLM2-135M-Instruct in the user's cache, downloaded if it is missing."""
    return fetch_default_model()


def write_tiny_gguf(
    path: Path,
    kind: TinyKind,
    model: nn.Module,
    type_: GGMLType = GGMLType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, npt.NDArray[np.float32]] | None = None,
) -> nn.Module:
    """Writes a ``tiny_model`` as llama.cpp's converter would, matrices as ``type_``.

    Args:
        model: gets its matrices back as quantization has rounded them. To run text through it, it
            needs a ``vocab_size`` of GGUF_VOCAB_SIZE.
        metadata: overrides keys; None removes one.
        tensors: further tensors in float32.

    Returns:
        ``model``.
    """
    config = tiny_config(kind)
    writer = gguf.GGUFWriter(path, kind)
    values = _metadata(kind, config) | _tokenizer_metadata() | (metadata or {})
    for key, value in values.items():
        _add(writer, key, value)
    rounded: list[tuple[str, mx.array]] = []
    for name, array in tree_flatten(model.parameters()):
        data = np.array(array)
        if data.ndim == 2:
            quantized = gguf.quantize(data, type_)
            dequantized = gguf.dequantize(quantized, type_).reshape(data.shape)
            rounded.append((name, mx.array(dequantized)))
            if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                quantized = _interleave(quantized, config["head_dim"])
            writer.add_tensor(_gguf_name(kind, name), quantized, raw_dtype=type_)
        else:
            is_shifted = kind == "gemma3" and "norm" in name
            writer.add_tensor(_gguf_name(kind, name), data + 1 if is_shifted else data)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_weights(rounded, strict=False)
    return model


def write_tiny_default_gguf(path: Path) -> None:
    """Writes a tiny random llama with the default model's tokenizer and chat template.

    Its steps take a fraction of the default model's time; its replies mean nothing.
    """
    found = GGUFFile(default_model_path()).metadata
    tokenizer = {key: value for key, value in found.items() if key.startswith("tokenizer.")}
    model = tiny_model("llama", vocab_size=len(tokenizer["tokenizer.ggml.tokens"]))
    write_tiny_gguf(path, "llama", model, metadata={"llama.context_length": 8192, **tokenizer})


def write_reciting_gguf(path: Path, reply: str) -> None:
    """Writes a tiny llama that answers every chat with ``reply``, printable ASCII without spaces.

    Only the last token matters: the layers add nothing to its embedding, which is the row of the
    output matrix for the token that follows. So no character may occur twice.
    """
    model = tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE, tied=False)
    for layer in model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight = mx.zeros_like(last.weight)
    # A prompt ends with a line break, in the spelling of byte-level vocabularies.
    chain = [(SPECIALS + BYTES).index(token) for token in ("Ċ", *reply, SPECIALS[IM_END_ID])]
    output = model.lm_head
    output.weight = mx.zeros_like(output.weight)
    output.weight[mx.array(chain[1:])] = model.model.norm(
        model.model.embed_tokens(mx.array(chain[:-1]))
    )
    write_tiny_gguf(path, "llama", model)


def _interleave(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """llama.cpp's row order: a RoPE pair (i, i + half) of each head becomes (2 i, 2 i + 1)."""
    order = [
        start + half * (head_dim // 2) + i
        for start in range(0, rows.shape[0], head_dim)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])


def _gguf_name(kind: TinyKind, name: str) -> str:
    stems = _GEMMA3_STEMS if kind == "gemma3" else _STEMS
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{stems[inner]}.{suffix}"
    return f"{stems[stem]}.{suffix}"


def _metadata(kind: TinyKind, config: dict[str, Any]) -> dict[str, Any]:
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if kind == "gemma3":
        values |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": config["sliding_window_pattern"],
            "rope.freq_base_swa": config["rope_local_base_freq"],
        }
    return {f"{kind}.{key}": value for key, value in values.items()}


def _tokenizer_metadata() -> dict[str, Any]:
    tokens = [*SPECIALS, *BYTES, MERGED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(BYTES) + 1),
        "tokenizer.ggml.merges": [" ".join(MERGED)],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
