"""As ``plain``, of types whose tiny instances are those of the conformance checks."""

from __future__ import annotations

from support.vision.processors.files import ProcessorFiles
from support.vision.processors.plain import PLAIN_PROCESSORS

_HALF = [0.5, 0.5, 0.5]

MORE_PLAIN_PROCESSORS: dict[str, ProcessorFiles] = {
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
    "qwen3_5": PLAIN_PROCESSORS["qwen3_vl"],
    "qwen3_5_moe": PLAIN_PROCESSORS["qwen3_vl"],
}
for _name in ("glm4v_moe", "glm_ocr"):
    MORE_PLAIN_PROCESSORS[_name] = MORE_PLAIN_PROCESSORS["glm4v"]
