"""Processors that scale an image to sizes of their own, of types with marks of their own."""

from __future__ import annotations

from support.vision.processors.files import ProcessorFiles

_HALF = [0.5, 0.5, 0.5]

SCALED_PROCESSORS: dict[str, ProcessorFiles] = {
    "gemma4": ProcessorFiles(
        {},
        {
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 4,
                "max_soft_tokens": 6,
                "pooling_kernel_size": 2,
                "image_mean": [0.0, 0.0, 0.0],
                "image_std": [1.0, 1.0, 1.0],
                "do_normalize": False,
            },
            "image_seq_length": 6,
        },
        "<|image|>",
        "<|image|>",
        tokens=dict.fromkeys(
            ("<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>")
        ),
        tokenizer={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        names=("image_token_id",),
    ),
    "granite4_vision": ProcessorFiles(
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {
            "processor_class": "Granite4VisionProcessor",
            "patch_size": 4,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "num_additional_image_tokens": 0,
            "downsample_rate": "2/4",
        },
        "<image>",
        "<image>",
        config={"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]},
        names=("image_token_index",),
    ),
    "inkling": ProcessorFiles(
        {},
        {"processor_class": "InklingProcessor", "image_token": "<|unused_200054|>"},
        "<|unused_200054|>",
        "<|content_image|><|unused_200054|>",
        tokens=dict.fromkeys(
            (
                "<|unused_200054|>",
                "<|content_image|>",
                "<|unused_200053|>",
                "<|content_audio_input|>",
            )
        ),
        # mlx-vlm's processor always has this size of a patch.
        parts={"vision_config": {"patch_size": 40}},
        names=("image_token_id",),
    ),
    "llama4": ProcessorFiles(
        {
            "image_processor_type": "Llama4ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {"processor_class": "Llama4Processor", "patch_size": 4, "pixel_shuffle_ratio": 0.5},
        "<|patch|>",
        "<|image|>",
        tokens=dict.fromkeys(
            (
                "<|image_start|>",
                "<|image_end|>",
                "<|patch|>",
                "<|tile_x_separator|>",
                "<|tile_y_separator|>",
            )
        ),
        # mlx-vlm's processor always has this size of a patch.
        parts={"vision_config": {"image_size": 56, "patch_size": 14}},
        names=("image_token_index",),
    ),
    "llava_onevision": ProcessorFiles(
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        "<image>",
        "<image>",
        tokens=dict.fromkeys(("<video>",)),
        config={"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]},
        names=("image_token_index",),
    ),
    "nemotron_h_nano_omni": ProcessorFiles(
        {
            "image_processor_type": "NemotronHNanoOmniImageProcessor",
            "norm_mean": _HALF,
            "norm_std": _HALF,
            "patch_size": 4,
            "downsample_ratio": 0.5,
            "min_num_patches": 4,
            "max_num_patches": 64,
            "max_model_len": 4096,
        },
        {"processor_class": "NemotronHNanoOmniProcessor"},
        "<image>",
        "<image>",
        tokens=dict.fromkeys(("<video>", "<so_embedding>", "<so_start>", "<so_end>")),
        names=("img_context_token_id",),
    ),
    "step3p7": ProcessorFiles(
        {},
        {"processor_class": "Step3VLProcessor"},
        "<im_patch>",
        "<im_patch>",
        tokens=dict.fromkeys(
            (
                "<im_patch>",
                "<im_start>",
                "<im_end>",
                "<patch_start>",
                "<patch_end>",
                "<patch_newline>",
            )
        ),
        attributes={
            "image_size": 32,
            "patch_size": 16,
            "num_image_feature_size": 4,
            "num_patch_feature_size": 1,
        },
        parts={"vision_config": {"mlp_ratio": 2.0}},
        names=("image_token_id",),
    ),
}
