"""What the processors read of types whose prompts mlx-vlm prepares in ways of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.vision.processors.files import ProcessorFiles

_HALF = [0.5, 0.5, 0.5]
_DEEPSEEK = "<\uff5cdeepseek_image\uff5c>"
_TILES: dict[str, Any] = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    "image_mean": _HALF,
    "image_std": _HALF,
}
_HUNYUAN = "processing_hunyuan_vl.HunYuanVLProcessor"
_JINA_TOKENS = ("<im_patch>", "<im_start>", "<im_end>", "<im_col>")

_PLAMO_TOKENS = ["<|plamo:unk|>", "<|endoftext|>", "<|plamo:pad|>", "<plamo:image>"]


def _write_plamo_tokenizer(path: Path) -> None:
    """A token for each byte, and PLaMo's own."""
    rows: list[list[Any]] = [[token, 0.0, "CONTROL"] for token in _PLAMO_TOKENS]
    rows += [[token, 0.0, "CONTROL"] for token in ("<siglip2:img>", "</siglip2:img>")]
    rows += [[f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)]
    (path / "tokenizer.jsonl").write_text("\n".join(map(json.dumps, rows)))


PREPARED_PROCESSORS: dict[str, ProcessorFiles] = {
    "deepseek_v41": ProcessorFiles(
        {},
        {},
        _DEEPSEEK,
        _DEEPSEEK,
        {"vision_min_pixels": 64, "vision_max_image_tokens": 24},
        tokens={_DEEPSEEK: None},
        names=("image_token_id",),
    ),
    "falcon_ocr": ProcessorFiles(
        {},
        {},
        "<|image|>",
        "",
        names=("img_id",),
        config={"spatial_patch_size": 16},
    ),
    "fastvlm": ProcessorFiles(
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 128},
            "crop_size": {"height": 128, "width": 128},
        },
        {"processor_class": "LlavaProcessor"},
        "<image>",
        "<image>",
        {"image_token_index": -200},
        names=(),
        named="llava_qwen2",
    ),
    # mlx-vlm's processor makes patches of this size only.
    "gemma4_unified": ProcessorFiles(
        {},
        {"processor_class": "Gemma4UnifiedProcessor"},
        "<image_soft_token>",
        "<image_soft_token>",
        parts={"vision_config": {"model_patch_size": 48}},
    ),
    "got": ProcessorFiles(
        {},
        {},
        "<imgpad>",
        "",
        tokens={"<imgpad>": None},
        names=("im_patch_token",),
        named="GOT",
        constants={
            "processing_got.build_got_prompt.__defaults__": (True, 16),
            "processing_got.GotOcrImageProcessor.__init__.__defaults__": (64, True, None, None),
        },
    ),
    "granite_vision": ProcessorFiles(
        {**_TILES, "size": {"height": 16, "width": 16}},
        {
            "processor_class": "LlavaNextProcessor",
            "patch_size": 4,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
        },
        "<image>",
        "<image>",
    ),
    "hunyuan_vl": ProcessorFiles(
        {},
        {},
        "<image>",
        "<image>",
        {"min_pixels": 64, "max_pixels": 1024},
        constants={
            f"{_HUNYUAN}.IMAGE_TOKEN_ID": "<image>",
            f"{_HUNYUAN}.IM_START_TOKEN_ID": "<img>",
            f"{_HUNYUAN}.IM_END_TOKEN_ID": "</img>",
        },
    ),
    "jina_vlm": ProcessorFiles(
        {},
        {},
        "<im_patch>",
        "<|image|>",
        parts={"vision_config": {"input_size": [24, 24], "image_size": 24}},
        tokens=dict.fromkeys(_JINA_TOKENS),
        named="jvlm",
        constants={
            # Of six patches of a side, crops share two at each edge; at most four crops.
            "image_processor.ImageProcessor.__init__.__defaults__": (
                *(None, (24, 24), 4, 4, 64, 2048, (2, 2), 2, 2, True, None, None),
                *_JINA_TOKENS,
            ),
        },
    ),
    # mlx-vlm's processor makes images of this size only.
    "llava_bunny": ProcessorFiles(
        {},
        {},
        "<image>",
        "<image>",
        {"image_token_index": -200},
        names=(),
        parts={"vision_config": {"image_size": 384, "patch_size": 14}},
        named="llava-qwen2",
    ),
    "llava_next": ProcessorFiles(
        _TILES,
        {
            "processor_class": "LlavaNextProcessor",
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
        "<image>",
        "<image>",
        config={"vision_feature_select_strategy": "default", "vision_feature_layer": -2},
    ),
    "mimo_v2": ProcessorFiles(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 64,
            "max_pixels": 1024,
        },
        {"processor_class": "Qwen2_5_VLProcessor"},
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    # mlx-vlm's processor makes images of this size only.
    "multi_modality": ProcessorFiles(
        {"image_processor_type": "VLMImageProcessor", "image_size": 384},
        {"processor_class": "VLChatProcessor", "num_image_tokens": 64},
        "<image>",
        "<image>",
        config={"num_image_tokens": 64},
        parts={"vision_config": {"image_size": 384, "patch_size": 48, "hidden_size": 64}},
    ),
    "plamo2vl": ProcessorFiles(
        {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_mean": _HALF,
            "image_std": _HALF,
            "patch_size": 4,
            "max_image_width": 64,
            "max_image_height": 64,
            "downsample_ratio": 1.0,
            "tile_context_length": 4096,
        },
        {"processor_class": "Plamo2VLProcessor"},
        "<plamo:image>",
        "",
        {"image_token_index": _PLAMO_TOKENS.index("<plamo:image>")},
        tokens={"<plamo:image>": None},
        names=(),
        write=_write_plamo_tokenizer,
    ),
}
