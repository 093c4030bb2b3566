"""What the processors read of types whose images are all of one size, or grids of patches."""

from __future__ import annotations

from typing import Any

from support.vision.processors.files import ProcessorFiles

_HALF = [0.5, 0.5, 0.5]
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
_PIXTRAL_IMAGES: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 16},
    "patch_size": {"height": 4, "width": 4},
}
_PIXTRAL: dict[str, Any] = {
    "processor_class": "PixtralProcessor",
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "patch_size": 4,
}
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"

PLAIN_PROCESSORS: dict[str, ProcessorFiles] = {
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
        _PIXTRAL_IMAGES,
        {
            **_PIXTRAL,
        },
        "[IMG]",
        "[IMG]",
    ),
    "mistral3": ProcessorFiles(
        _PIXTRAL_IMAGES,
        {
            **_PIXTRAL,
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
PLAIN_PROCESSORS["internvl"] = ProcessorFiles(
    {},
    {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "<IMG_CONTEXT>",
    "<IMG_CONTEXT>",
)
PLAIN_PROCESSORS["internvl_chat"] = ProcessorFiles(
    {}, {"processor_class": "InternVLChatProcessor"}, "<IMG_CONTEXT>", "<image>"
)
PLAIN_PROCESSORS["qwen3_vl_moe"] = PLAIN_PROCESSORS["qwen3_vl"]
