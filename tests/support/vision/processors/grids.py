"""Processors that divide an image into a grid of patches, of types with marks of their own."""

from __future__ import annotations

from typing import Any

from support.vision.processors.files import SMALL_ROPE, ProcessorFiles

_HALF = [0.5, 0.5, 0.5]
_KIMI: dict[str, Any] = {
    "media_proc_cfg": {
        "in_patch_limit": 16_384,
        "patch_size": 14,
        "image_mean": _HALF,
        "image_std": _HALF,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
    },
}
_KIMI_TOKENS = dict.fromkeys(
    ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
)

_QWEN: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": _HALF,
    "image_std": _HALF,
}
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN3_VL = ProcessorFiles(
    {**_QWEN, "image_processor_type": "Qwen2VLImageProcessorFast"},
    {"processor_class": "Qwen3VLProcessor"},
    "<|image_pad|>",
    _QWEN_MARK,
    names=("image_token_id",),
)
# Of the parts of Qwen3-Omni that speak.
_SPEAKER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_QWEN3_OMNI_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

# Of some types, mlx-vlm's ``load`` ignores the settings, so they have the published ones.
GRID_PROCESSORS: dict[str, ProcessorFiles] = {
    "cohere_compass": ProcessorFiles(
        {
            "image_processor_type": "CohereCompassImageProcessor",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 16_384,
            "max_pixels": 3_868_706,
        },
        {"processor_class": "CohereCompassProcessor"},
        "<|IMAGE_PAD|>",
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        tokens=dict.fromkeys(("<|IMAGE_PAD|>", "<|VISION_START|>", "<|VISION_END|>")),
        parts={
            "vision_config": {"patch_size": 16},
            "text_config": {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "default",
                        "rope_theta": 10_000.0,
                        "mrope_section": [2, 3, 3],
                    },
                },
            },
        },
        names=("image_token_id",),
    ),
    "dots_ocr": ProcessorFiles(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": 64,
            "max_pixels": 1024,
        },
        {"processor_class": "DotsVLProcessor"},
        "<|imgpad|>",
        "<|img|><|imgpad|><|endofimg|>",
        tokens=dict.fromkeys(("<|img|>", "<|imgpad|>", "<|endofimg|>")),
        attributes={"image_token_id": 279},
        names=("image_token_id",),
    ),
    "glm5_next": ProcessorFiles(
        {},
        {
            "processor_class": "Glm5NextProcessor",
            "image_processor": {
                "image_processor_type": "Glm5NextImageProcessor",
                "patch_size": 14,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "min_image_tokens": 16,
                "max_image_tokens": 8000,
            },
            "video_processor": {"video_processor_type": "Glm5NextVideoProcessor"},
        },
        "<|image|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        tokens=dict.fromkeys(
            (
                "<|begin_of_image|>",
                "<|end_of_image|>",
                "<|video|>",
                "<|begin_of_video|>",
                "<|end_of_video|>",
            )
        ),
        parts={"vision_config": {"patch_size": 14}},
        names=("image_token_id",),
    ),
    "kimi_k25": ProcessorFiles(
        _KIMI,
        {"processor_class": "KimiK25Processor"},
        "<|media_pad|>",
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        tokens=_KIMI_TOKENS,
        parts={"vision_config": {"patch_size": 14}},
        names=("media_placeholder_token_id",),
    ),
    "kimi_k3": ProcessorFiles(
        _KIMI,
        {"processor_class": "KimiK3Processor"},
        "<|media_pad|>",
        "<|kimi_image_placeholder|>",
        tokens=_KIMI_TOKENS,
        parts={"vision_config": {"patch_size": 14}},
        names=("media_placeholder_token_id",),
    ),
    "locateanything": ProcessorFiles(
        {
            "image_processor_type": "LocateAnythingImageProcessor",
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "in_token_limit": 25_600,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {"processor_class": "LocateAnythingProcessor", "image_token": "<IMG_CONTEXT>"},
        "<IMG_CONTEXT>",
        "<image-{}>",
        parts={
            "text_config": {"tie_word_embeddings": True},
            "vision_config": {"patch_size": 14},
        },
        constants=SMALL_ROPE,
        names=("image_token_index",),
    ),
    "mage_vl": ProcessorFiles(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": 64,
            "max_pixels": 1024,
        },
        {"processor_class": "MageVLProcessor"},
        "<|image_pad|>",
        _QWEN_MARK,
        names=("image_token_id",),
    ),
    "minimax_m3_vl": ProcessorFiles(
        {**_QWEN, "image_processor_type": "MiniMaxM3VLImageProcessor"},
        {"processor_class": "MiniMaxM3VLProcessor"},
        "]<]image[>[",
        "]<]image[>[",
        tokens=dict.fromkeys(
            ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
        ),
        names=("image_token_index",),
    ),
    "muse_glimmer": ProcessorFiles(
        {},
        {
            "processor_class": "MuseGlimmerProcessor",
            "image_processor": {
                "image_processor_type": "MuseGlimmerImageProcessor",
                "patch_size": 4,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "max_image_tokens": 16,
                "image_mean": _HALF,
                "image_std": _HALF,
            },
        },
        "<|patch|>",
        "<|patch|>",
        tokens=dict.fromkeys(("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>")),
        names=("image_token_id",),
    ),
    "paddleocr_vl": ProcessorFiles(
        {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": 64,
            "max_pixels": 1024,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        {"processor_class": "PaddleOCRVLProcessor"},
        "<|IMAGE_PLACEHOLDER|>",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        tokens=dict.fromkeys(("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")),
        names=("image_token_id",),
    ),
    "prism_hadamard_qwen35": _QWEN3_VL,
    "qwen3_omni_moe": ProcessorFiles(
        {
            **_QWEN,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 16,
            "image_processor_type": "Qwen2VLImageProcessor",
        },
        {"processor_class": "Qwen3OmniMoeProcessor"},
        "<|image_pad|>",
        _QWEN_MARK,
        tokens=dict.fromkeys(("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")),
        config={"enable_audio_output": True},
        parts={
            "talker_config": {
                "num_code_groups": 2,
                "thinker_hidden_size": 64,
                "code_predictor_config": {**_SPEAKER, "vocab_size": 32, "num_code_groups": 2},
            },
            "code2wav_config": {
                **_SPEAKER,
                "codebook_dim": 8,
                "codebook_size": 16,
                "decoder_dim": 16,
                "upsample_rates": [2],
                "upsampling_ratios": [2],
                "num_quantizers": 2,
            },
        },
        tokenizer={**_QWEN3_OMNI_TOKENS, "extra_special_tokens": _QWEN3_OMNI_TOKENS},
        names=("thinker_config.image_token_id",),
    ),
    "qwen4_exp": _QWEN3_VL._replace(parts={"text_config": {"indexer_kv_heads": 1}}),
    "zaya1_vl": ProcessorFiles(
        {**_QWEN, "image_processor_type": "Qwen2VLImageProcessor"},
        {"processor_class": "Zaya1VLProcessor"},
        "<image>",
        "<|vision_start|><image><|vision_end|>",
        names=("image_token_id",),
    ),
}
