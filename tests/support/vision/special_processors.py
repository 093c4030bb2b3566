"""What the processors read of types whose prompts are prepared in a way of their own."""

from __future__ import annotations

from typing import Any

from support.vision.vision_dir import ProcessorFiles

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

SPECIAL_PROCESSORS: dict[str, ProcessorFiles] = {
    "deepseek_v41": ProcessorFiles(
        {},
        {},
        _DEEPSEEK,
        _DEEPSEEK,
        {
            "image_token_id": _DEEPSEEK,
            "vision_min_pixels": 64,
            "vision_max_image_tokens": 24,
        },
        (_DEEPSEEK,),
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
    ),
    "gemma4_unified": ProcessorFiles(
        {},
        {"processor_class": "Gemma4UnifiedProcessor"},
        "<image_soft_token>",
        "<image_soft_token>",
        # mlx-vlm's processor makes patches of this size only.
        {"vision_config": {"model_patch_size": 48}},
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
            "processing_hunyuan_vl.HunYuanVLProcessor.IMAGE_TOKEN_ID": "<image>",
            "processing_hunyuan_vl.HunYuanVLProcessor.IM_START_TOKEN_ID": "<img>",
            "processing_hunyuan_vl.HunYuanVLProcessor.IM_END_TOKEN_ID": "</img>",
        },
    ),
    "jina_vlm": ProcessorFiles(
        {},
        {},
        "<im_patch>",
        "<|image|>",
        {"model_type": "jvlm", "vision_config": {"input_size": [24, 24], "image_size": 24}},
        ("<im_patch>", "<im_start>", "<im_end>", "<im_col>"),
        constants={
            # Of six patches of a side, crops share two at each edge; at most four crops.
            "image_processor.ImageProcessor.__init__.__defaults__": (
                *(None, (24, 24), 4, 4, 64, 2048, (2, 2), 2, 2, True, None, None),
                *("<im_patch>", "<im_start>", "<im_end>", "<im_col>"),
            ),
        },
    ),
    "llava_bunny": ProcessorFiles(
        {},
        {},
        "<image>",
        "<image>",
        # mlx-vlm's processor makes images of this size only.
        {"image_token_index": -200, "vision_config": {"image_size": 384, "patch_size": 14}},
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
        {"vision_feature_select_strategy": "default", "vision_feature_layer": -2},
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
    "multi_modality": ProcessorFiles(
        {"image_processor_type": "VLMImageProcessor", "image_size": 16},
        {"processor_class": "VLChatProcessor", "num_image_tokens": 64},
        "<image>",
        "<image>",
        {
            "image_token_index": "<image>",
            "num_image_tokens": 64,
            # mlx-vlm's processor makes images of this size only.
            "vision_config": {"image_size": 384, "patch_size": 48, "hidden_size": 64},
        },
    ),
}
