"""What the processors of types read whose images are tiles, crops or patches with sizes."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.vision.processors.files import SMALL_ROPE, ProcessorFiles

_OCR_WIDTH = 32
_CLIP = {"hidden_size": _OCR_WIDTH, "width": _OCR_WIDTH, "num_attention_heads": 2}
_DEEPSEEK: dict[str, Any] = {
    "candidate_resolutions": [[16, 16], [16, 32], [32, 16], [32, 32]],
    "patch_size": 4,
    "downsample_ratio": 2,
    "image_token": "<image>",
    "pad_token": "<|endoftext|>",
}


def _sam_config() -> SimpleNamespace:
    """The sizes of DeepSeek-OCR's first encoder, which are no fields of the config."""
    return SimpleNamespace(
        image_size=1024,
        width=16,
        layers=1,
        heads=2,
        patch_size=16,
        window_size=14,
        global_attn_indexes=(),
    )


def _sam(**sizes: Any) -> Any:
    """That encoder with few channels, where its code has constants. Those of others are theirs."""
    import mlx.nn as nn
    from mlx_vlm.models.deepseekocr.sam import SAMEncoder

    if sizes["img_size"] != _sam_config().image_size:
        return SAMEncoder(**sizes)
    encoder = SAMEncoder(**{**sizes, "out_chans": 8, "final_out_chans": _OCR_WIDTH})
    encoder.net_2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
    encoder.net_3 = nn.Conv2d(8, _OCR_WIDTH, 3, stride=2, padding=1, bias=False)
    return encoder


def _qwen2_encoder(**_: Any) -> Any:
    """DeepSeek-OCR 2's second encoder."""
    from mlx_vlm.models.deepseekocr_2.config import Qwen2EncoderConfig

    return Qwen2EncoderConfig(dim=_OCR_WIDTH, layers=1, heads=2, kv_heads=1, intermediate_size=64)


def _deepseek_ocr(
    name: str,
    input_dim: int,
    sizes: tuple[tuple[int, int], ...],
    constants: dict[str, Any],
    code: str,
    vision: dict[str, Any],
    **settings: Any,
) -> ProcessorFiles:
    """A processor whose sizes are constants of mlx-vlm."""
    values = {
        "candidate_resolutions": [[1024, 1024]],
        "patch_size": 16,
        "downsample_ratio": 4,
        "pad_token": "<|endoftext|>",
    }
    return ProcessorFiles(
        {},
        {"processor_class": name, **values},
        "<image>",
        "<image>\n",
        sizes=sizes,
        constants={f"{code}.SAMViTConfig": _sam_config, f"{code}.SAMEncoder": _sam, **constants},
        parts={
            "projector_config": {"input_dim": input_dim},
            "vision_config": vision,
        },
        **settings,
    )


_PHI3_CLIP = SimpleNamespace(
    model_type="phi3_v",
    hidden_size=1024,
    image_size=336,
    intermediate_size=64,
    layer_norm_eps=1e-05,
    num_attention_heads=16,
    num_channels=3,
    num_hidden_layers=1,
    patch_size=14,
)
_MINICPM: dict[str, str | None] = dict.fromkeys(
    ["<unk>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|listen|>"]
)
_MINICPMV = {
    "image_processor_type": "MiniCPMVImageProcessor",
    "patch_size": 4,
    "scale_resolution": 32,
    "max_slice_nums": 4,
    "slice_mode": True,
}
# Sentencepiece's first three tokens are special ones.
_ERNIE_TOKENS = [
    "<mask:1>",
    "<mask:7>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|image@placeholder|>",
]
_ERNIE_IMAGE = 3 + _ERNIE_TOKENS.index("<|IMAGE_PLACEHOLDER|>")


def _write_sentencepiece(path: Path) -> None:
    """Writes the tokenizer of ERNIE's processor."""
    from sentencepiece import SentencePieceTrainer

    file = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["Look: and what? 0123456789 () abcdefghijklm nopqrstuvwxyz"]),
        model_writer=file,
        model_type="char",
        vocab_size=100,
        hard_vocab_limit=False,
        user_defined_symbols=_ERNIE_TOKENS,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(file.getvalue())


TILED_PROCESSORS: dict[str, ProcessorFiles] = {
    # The last size of each has tiles.
    "deepseekocr": _deepseek_ocr(
        "DeepseekOCRProcessor",
        2 * _OCR_WIDTH,
        ((40, 24), (650, 300)),
        {},
        "deepseekocr",
        _CLIP,
    ),
    "deepseekocr_2": _deepseek_ocr(
        "DeepseekOCR2Processor",
        _OCR_WIDTH,
        ((24, 24), (700, 350)),
        {"vision.Qwen2EncoderConfig": _qwen2_encoder},
        "deepseekocr_2",
        {},
    ),
    "unlimited_ocr": _deepseek_ocr(
        "UnlimitedOCRProcessor",
        2 * _OCR_WIDTH,
        ((40, 24), (1300, 650)),
        {},
        "deepseekocr",
        _CLIP,
        named="unlimited-ocr",
    ),
    "deepseek_vl_v2": ProcessorFiles(
        {},
        {"processor_class": "DeepseekVLV2Processor", **_DEEPSEEK},
        "<image>",
        "<image>\n",
        tokens=dict.fromkeys(["<|User|>", "<|Assistant|>"]),
    ),
    # Its processor has the sizes of mlx-vlm, whatever the files say.
    "kimi_vl": ProcessorFiles(
        {},
        {"processor_class": "KimiVLProcessor"},
        "<|media_pad|>",
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        parts={"vision_config": {"patch_size": 14}},
        tokens={
            "<|media_pad|>": "media_placeholder_token_id",
            "<|media_start|>": None,
            "<|media_content|>": None,
            "<|media_end|>": None,
        },
        constants=SMALL_ROPE,
        sizes=((60, 40), (30, 80), (28, 28), (90, 29)),
    ),
    "molmo": ProcessorFiles(
        {
            "max_crops": 4,
            "overlap_margins": [2, 2],
            "base_image_input_size": [32, 32],
            "image_token_length_w": 4,
            "image_token_length_h": 4,
            "image_patch_size": 4,
        },
        {"processor_class": "MolmoProcessor"},
        "<im_patch>",
        "",
        parts={
            "vision_config": {"image_default_input_size": (32, 32), "image_num_pos": 65},
        },
        tokens=dict.fromkeys(["<im_patch>", "<im_col>", "<im_start>", "<im_end>"]),
    ),
    "molmo2": ProcessorFiles(
        {},
        {"processor_class": "Molmo2Processor"},
        "<im_patch>",
        "<|image|>",
        parts={
            "vision_config": {
                "vit_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "image_patch_size": 14,
                    "image_num_pos": 729,
                    "image_default_input_size": [378, 378],
                },
            }
        },
        tokens={
            "<im_patch>": "image_patch_id",
            "<im_end>": "image_end_token_id",
            "<im_col>": None,
            "<im_start>": None,
            "<low_res_im_start>": None,
        },
        sizes=((40, 24), (500, 200)),
    ),
    "phi3_v": ProcessorFiles(
        {"num_crops": 2},
        {"processor_class": "Phi3VProcessor"},
        "",
        "<|image_{}|>",
        constants={"vision.VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG": _PHI3_CLIP},
        sizes=((40, 24), (20, 30)),
    ),
    "phi4_siglip": ProcessorFiles(
        {},
        {"processor_class": "Phi4VisionRProcessor"},
        "",
        "<image>\n",
        config={
            "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
            "min_num_patches": 4,
            "max_num_patches": 36,
        },
        named="phi4-siglip",
    ),
    "phi4mm": ProcessorFiles(
        {},
        {"processor_class": "Phi4MMProcessor"},
        "",
        "<|image_{}|>",
        config={"image_token_index": -200, "min_num_patches": 4, "max_num_patches": 36},
    ),
    "ernie4_5_moe_vl": ProcessorFiles(
        {},
        {"processor_class": "Ernie4_5_VLProcessor"},
        "",
        "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        config={
            "image_token_id": _ERNIE_IMAGE,
            "im_patch_id": _ERNIE_IMAGE,
            "min_pixels": 64,
            "max_pixels": 1024,
        },
        write=_write_sentencepiece,
    ),
    "minicpmo": ProcessorFiles(
        {
            "image_processor_type": "MiniCPMVImageProcessor",
            "feature_extractor_type": "MiniCPMAAudioProcessor",
            "patch_size": 4,
            "scale_resolution": 16,
            "image_feature_size": 4,
            "feature_size": 80,
        },
        {"processor_class": "MiniCPMOProcessor"},
        "<unk>",
        "<image>./</image>",
        tokens=_MINICPM,
    ),
    "minicpmv4_6": ProcessorFiles(
        _MINICPMV,
        {"processor_class": "MiniCPMVProcessor"},
        "<|image_pad|>",
        "<image>./</image>",
        tokens=_MINICPM,
    ),
    "minicpmv4_7": ProcessorFiles(
        _MINICPMV,
        {"processor_class": "MiniCPMV4_7Processor"},
        "<|image_pad|>",
        "<|image_pad|>",
        tokens={
            **_MINICPM,
            "<image>": "image_start_id",
            "</image>": "image_end_id",
            "<slice>": "slice_start_id",
            "</slice>": "slice_end_id",
        },
    ),
    "moondream3": ProcessorFiles(
        {},
        {"processor_class": "Moondream3Processor"},
        "",
        "",
        parts={"vision_config": {"crop_size": 378, "patch_size": 14, "max_crops": 3}},
        sizes=((40, 24), (500, 200)),
    ),
}
