"""Directories of tiny random models that see: weights, tokenizer, processor, chat template."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from conformance.vision.configs import tiny_config, tiny_model
from conformance.vision.tiny import Tiny
from conformance.vision.types import TYPES
from mlx.utils import tree_flatten
from PIL import Image
from support.tiny import EOS_ID, SPECIALS, tiny_tokenizer
from support.vision.processor_files import ProcessorFiles
from support.vision.special_processors import SPECIAL_PROCESSORS
from support.vision.tiled_processors import TILED_PROCESSORS
from support.vision.tiny_vision import CONFIGS, vlm_model
from tokenizers import AddedToken

_HALF = [0.5, 0.5, 0.5]
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


_IDEFICS: dict[str, Any] = {
    "size": {"longest_edge": 32},
    "max_image_size": {"longest_edge": 16},
    "do_image_splitting": True,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_QWEN: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 1024,
}
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"

PROCESSORS: dict[str, ProcessorFiles] = {
    "gemma3": ProcessorFiles(
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "<image_soft_token>",
        "<start_of_image>",
    ),
    "llava": ProcessorFiles(
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "<image>",
        "<image>",
    ),
    "idefics3": ProcessorFiles(
        {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "<image>",
        "<image>",
    ),
    "smolvlm": ProcessorFiles(
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "<image>",
        "<image>",
    ),
    "pixtral": ProcessorFiles(
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 16},
            "patch_size": {"height": 4, "width": 4},
        },
        {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
        },
        "[IMG]",
        "[IMG]",
    ),
    "mistral3": ProcessorFiles(
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 16},
            "patch_size": {"height": 4, "width": 4},
        },
        {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        "[IMG]",
        "[IMG]",
    ),
    "qwen3_vl": ProcessorFiles(
        {**_QWEN, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        {"processor_class": "Qwen3VLProcessor"},
        "<|image_pad|>",
        _QWEN_MARK,
    ),
    "qwen2_vl": ProcessorFiles(
        _QWEN, {"processor_class": "Qwen2VLProcessor"}, "<|image_pad|>", _QWEN_MARK
    ),
    "qwen2_5_vl": ProcessorFiles(
        _QWEN, {"processor_class": "Qwen2_5_VLProcessor"}, "<|image_pad|>", _QWEN_MARK
    ),
}
PROCESSORS["internvl"] = ProcessorFiles(
    {},
    {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "<IMG_CONTEXT>",
    "<IMG_CONTEXT>",
)
PROCESSORS["internvl_chat"] = ProcessorFiles(
    {}, {"processor_class": "InternVLChatProcessor"}, "<IMG_CONTEXT>", "<image>"
)
PROCESSORS["qwen3_vl_moe"] = PROCESSORS["qwen3_vl"]


# Of types whose tiny instances are those of the conformance checks.
MORE_PROCESSORS: dict[str, ProcessorFiles] = {
    "aya_vision": ProcessorFiles(
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": False,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {
            "processor_class": "AyaVisionProcessor",
            "patch_size": 4,
            "img_size": 16,
            "downsample_factor": 2,
            "image_token": "<image>",
        },
        "<|IMG_PATCH|>",
        "<image>",
    ),
    "glm4v": ProcessorFiles(
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 2048},
        },
        {"processor_class": "Glm46VProcessor"},
        "<|image|>",
        "<|image|>",
    ),
    "idefics2": ProcessorFiles(
        {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"longest_edge": 16, "shortest_edge": 8},
            "do_image_splitting": False,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {"processor_class": "Idefics2Processor", "image_seq_len": 4},
        "<image>",
        "<image>",
    ),
    "lfm2_vl": ProcessorFiles(
        {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 4,
            "tile_size": 16,
            "min_image_tokens": 1,
            "max_image_tokens": 8,
            "min_tiles": 1,
            "max_tiles": 1,
        },
        {"processor_class": "Lfm2VlProcessor"},
        "<image>",
        "<image>",
    ),
    "paligemma": ProcessorFiles(
        {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_seq_length": 16,
        },
        {"processor_class": "PaliGemmaProcessor"},
        "<image>",
        "<image>",
    ),
    "qwen3_5": PROCESSORS["qwen3_vl"],
    "qwen3_5_moe": PROCESSORS["qwen3_vl"],
}
for _name in ("glm4v_moe", "glm_ocr"):
    MORE_PROCESSORS[_name] = MORE_PROCESSORS["glm4v"]


ALL_PROCESSORS = PROCESSORS | MORE_PROCESSORS | TILED_PROCESSORS


def vision_dir(
    tmp_path: Path, model_type: str, *, seed: int = 0, template_takes_parts: bool = True
) -> Path:
    """Writes a directory of a tiny random model under ``tmp_path``."""
    path = tmp_path / f"tiny-{model_type}"
    path.mkdir(parents=True)
    files = (ALL_PROCESSORS | SPECIAL_PROCESSORS)[model_type]
    tokenizer = tiny_tokenizer()
    tokens = [*_TOKENS, *files.tokens]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    tiny = _tiny(model_type, files, ids)
    image_id = {
        key: ids[files.token]
        for key in ("image_token_id", "image_token_index")
        if files.token in ids
    }
    config: dict[str, Any] = {
        **(CONFIGS.get(model_type) or tiny_config(model_type, tiny)),
        "model_type": files.named or model_type,
        "eos_token_id": EOS_ID,
        **image_id,
        **{key: ids[token] for token, key in files.tokens.items() if key is not None},
        **files.config,
    }
    if model_type.startswith("qwen"):
        config |= {
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "video_token_id": ids["<|video_pad|>"],
        }
    # transformers warns of some fields, even if they say nothing.
    _write(path / "config.json", {key: v for key, v in config.items() if v is not None})
    if model_type in CONFIGS:
        model = vlm_model(model_type, seed)
    else:
        model = tiny_model(model_type, seed, tiny)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
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
    _write(path / "tokenizer_config.json", settings)
    if files.processor:
        name = {"processor_class": files.processor["processor_class"]}
        _write(path / "preprocessor_config.json", {**files.image, **name})
        _write(path / "processor_config.json", files.processor)
    files.write(path)
    return path


def _tiny(model_type: str, files: ProcessorFiles, ids: Mapping[str, int]) -> Tiny | None:
    """What the tiny instance is made of, with the sizes that the files have; None: no other."""
    if not (files.parts or files.constants or files.values):
        return None
    tiny = TYPES[model_type]
    parts = {
        part: {**(tiny.config.get(part) or {}), **values} for part, values in files.parts.items()
    }
    return replace(
        tiny,
        config={**tiny.config, **files.values, **parts},
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
