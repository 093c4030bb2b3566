"""Tiny random models: real mlx-lm architectures, real files, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma3_text, lfm2, llama, qwen2, qwen3
from support.noise import noise
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TinyKind = Literal["llama", "qwen2", "qwen3", "gemma3", "lfm2"]

_MODULES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3_text, "lfm2": lfm2}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID, IM_START_ID, IM_END_ID = range(3)
VOCAB_SIZE = len(SPECIALS) + len(BYTES)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(
    kind: TinyKind,
    *,
    vocab_size: int = VOCAB_SIZE,
    sliding_window: int = 16,
    layers: int | None = None,
    tied: bool = True,
    head_dim: int = 16,
) -> dict[str, Any]:
    """The config.json of a tiny model: 64 wide, 4 heads, 2 KV heads, context 4096.

    gemma3 has 3 layers: the second is global, the others have a sliding window. lfm2 has 4; every
    other one is a short convolution with a recurrent state. The others have 2 layers.
    With ``tied`` False the output matrix is separate from the embedding.
    """
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 64,
        "num_hidden_layers": layers or (3 if kind == "gemma3" else 2),
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_ID,
    }
    if kind == "lfm2":
        config |= {
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 4,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
        }
    if kind == "gemma3":
        config |= {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 1000.0,
            "sliding_window": sliding_window,
            "sliding_window_pattern": 2,
        }
    return config


def tiny_model(
    kind: TinyKind,
    seed: int = 0,
    *,
    vocab_size: int = VOCAB_SIZE,
    sliding_window: int = 16,
    layers: int | None = None,
    tied: bool = True,
    head_dim: int = 16,
) -> nn.Module:
    """A random instance in float32, evaluated; the same seed gives the same weights.

    ``sliding_window`` (columns) matters to gemma3 only. MLX's global random state is not touched.
    """
    size = {"vocab_size": vocab_size, "sliding_window": sliding_window, "head_dim": head_dim}
    config = tiny_config(kind, **size, layers=layers, tied=tied)
    module = _MODULES[kind]
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if kind == "gemma3" and tied:
        model.sanitize({})  # removes the output matrix, as for a checkpoint without one
    weights = []
    for number, (name, old) in enumerate(tree_flatten(model.parameters())):
        drawn = noise(seed, number, old.shape)
        if "norm" in name:
            # Not 1 (gemma3: 0), so that a missing or shifted norm changes the output.
            new = 0.2 * drawn + (0.0 if kind == "gemma3" else 1.0)
        elif name.endswith("bias"):
            new = 0.3 * drawn
        else:
            # 1.5 / sqrt(fan-in): activations so large that tokens depend on their context.
            new = drawn * (1.5 / old.shape[-1] ** 0.5)
        weights.append((name, new))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: three special tokens, then one token a byte, no merges."""
    vocab = {token: i for i, token in enumerate(SPECIALS + BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tokenizer


def tiny_model_dir(
    tmp_path: Path,
    kind: TinyKind,
    seed: int = 0,
    *,
    sliding_window: int = 16,
    layers: int | None = None,
    tied: bool = True,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Writes an mlx-lm directory under ``tmp_path``: config, weights, tokenizer, chat template.

    A ``vocab_size`` above VOCAB_SIZE gives the model more token ids than its tokenizer knows.
    """
    path = tmp_path / f"tiny-{kind}"
    path.mkdir(parents=True)
    size: dict[str, Any] = {"vocab_size": vocab_size, "sliding_window": sliding_window}
    config = tiny_config(kind, **size, layers=layers, tied=tied)
    (path / "config.json").write_text(json.dumps(config))
    model = tiny_model(kind, seed, **size, layers=layers, tied=tied)
    mx.save_safetensors(
        str(path / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[EOS_ID],
        "pad_token": SPECIALS[EOS_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path
