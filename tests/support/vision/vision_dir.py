"""Directories of tiny random vision models: weights, tokenizer, processor, chat template."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from conformance.vision.configs import set_constants, tiny_config, tiny_model
from conformance.vision.tiny import Tiny
from conformance.vision.types import TYPES
from mlx.utils import tree_flatten
from PIL import Image
from support.tiny import EOS_ID, SPECIALS, tiny_tokenizer
from support.vision.processors import PROCESSORS, ProcessorFiles
from support.vision.tiny_vision import CONFIGS, vlm_model
from tokenizers import AddedToken

_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<image_soft_token>",
    "<start_of_image>",
    "<end_of_image>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image|>",
    "<|IMG_PATCH|>",
]


# The keys of config.json that have the id of an image's token, by type.
_ID_NAMES = (
    "image_token_id",
    "image_token_index",
    "img_context_token_id",
    "media_placeholder_token_id",
)


def vision_dir(
    tmp_path: Path,
    model_type: str,
    *,
    seed: int = 0,
    template_takes_parts: bool = True,
    weights: bool = True,
) -> Path:
    """Writes a directory of a tiny random model under ``tmp_path``.

    Args:
        weights: without them, only the model's processor can be loaded.
    """
    _cache_signatures()
    path = tmp_path / f"tiny-{model_type}"
    path.mkdir(parents=True)
    files = PROCESSORS[model_type]
    tokenizer = tiny_tokenizer()
    tokens = [*_TOKENS, *files.tokens]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    tiny = _tiny(model_type, files, ids)
    config: dict[str, Any] = {
        **(CONFIGS.get(model_type) or tiny_config(model_type, tiny)),
        "model_type": files.named or model_type,
        "eos_token_id": EOS_ID,
    }
    config = {name: value for name, value in config.items() if name not in _ID_NAMES}
    for name in files.names if files.token else ():
        *part, name = name.split(".")
        (config[part[0]] if part else config)[name] = ids[files.token]
    config |= {key: ids[token] for token, key in files.tokens.items() if key is not None}
    config |= files.config
    if model_type.startswith("qwen"):
        config |= {
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "video_token_id": ids["<|video_pad|>"],
        }
    # transformers warns of some fields, even if they say nothing.
    _write(path / "config.json", {key: v for key, v in config.items() if v is not None})
    if weights:
        _write_weights(path, model_type, seed, tiny)
    elif tiny is not None:
        set_constants(model_type, tiny)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[EOS_ID],
        "pad_token": SPECIALS[EOS_ID],
        "bos_token": SPECIALS[EOS_ID],
        "chat_template": chat_template(files.mark if template_takes_parts else None),
        "clean_up_tokenization_spaces": False,
    }
    if "<unk>" in ids:
        settings["unk_token"] = "<unk>"
    if model_type.startswith("gemma"):
        settings |= {
            "image_token": files.token,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
    _write(path / "tokenizer_config.json", {**settings, **files.tokenizer})
    if files.processor:
        name = {"processor_class": files.processor["processor_class"]}
        _write(path / "preprocessor_config.json", {**files.image, **name})
        _write(path / "processor_config.json", files.processor)
    files.write(path)
    return path


@cache
def _cache_signatures() -> None:
    """Keeps the signatures for which mlx-vlm asks once for each value of a config."""
    from mlx_vlm.models import base

    base.inspect = SimpleNamespace(signature=cache(inspect.signature))


def _write_weights(path: Path, model_type: str, seed: int, tiny: Tiny | None) -> None:
    if model_type in CONFIGS:
        model = vlm_model(model_type, seed)
    else:
        model = tiny_model(model_type, seed, tiny)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})


def _tiny(model_type: str, files: ProcessorFiles, ids: Mapping[str, int]) -> Tiny | None:
    """What the tiny instance is made of, with the sizes that the files have; None: no other."""
    if not (files.parts or files.constants or files.config):
        return None
    tiny = TYPES[model_type]
    parts = {
        part: {**(tiny.config.get(part) or {}), **values} for part, values in files.parts.items()
    }
    return replace(
        tiny,
        config={**tiny.config, **files.config, **parts},
        constants={**tiny.constants, **{n: _with_ids(v, ids) for n, v in files.constants.items()}},
    )


def _with_ids(value: Any, ids: Mapping[str, int]) -> Any:
    """A constant with the ids of the tokens in it."""
    if isinstance(value, tuple):
        return tuple(_with_ids(each, ids) for each in value)
    return ids.get(value, value) if isinstance(value, str) else value


def chat_template(mark: str | None) -> str:
    """A template that writes ``mark`` for each image; with None, one that takes texts only."""
    content = "{{ message['content'] }}"
    if mark is not None:
        content = (
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}" + mark + "{% else %}{{ part['text'] }}{% endif %}"
            "{% endfor %}{% endif %}"
        )
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        + content
        + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def picture(
    seed: int, width: int = 40, height: int = 24, kind: str = "PNG", **settings: Any
) -> bytes:
    """The file of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **settings)
    return file.getvalue()


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
