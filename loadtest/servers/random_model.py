"""Writes a model with random weights to a folder that a server can load, with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chairlift.loadtest.shapes import GROUP, random_model

SPECIALS = ("<|end|>", "<|unknown|>")


def write_random_model(
    config: dict[str, Any], dtype: mx.Dtype, bits: int | None, folder: Path
) -> None:
    """Writes a model of this config whose tokens are words.

    Args:
        bits: see ``random_model``.

    Raises:
        ValueError: mlx-lm has no such model type.
    """
    settings = {**config, "eos_token_id": 0}
    if bits is not None:
        settings["quantization"] = {"group_size": GROUP, "bits": bits}
    weights: Any = tree_flatten(random_model(config, dtype, bits).parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings))
    words = [f"w{number}" for number in range(config["vocab_size"] - len(SPECIALS))]
    word_tokenizer(words).save_pretrained(folder)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word and its leading space, as in byte-level vocabularies.

    The token of ``words[i]`` is ``i + len(SPECIALS)``, and that of ``SPECIALS[i]`` is i.
    """
    space = "Ġ"
    tokens = [*SPECIALS, *(space + word for word in words)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[1]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIALS[0],
        unk_token=SPECIALS[1],
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        clean_up_tokenization_spaces=False,
    )
