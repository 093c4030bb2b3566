"""Types whose images are crops with indices, masks or bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conformance.vision.special_forms import deepseek, deepseek_ocr, indexed, minicpm, phi3, pooled
from conformance.vision.tiny import Tiny
from conformance.vision.values import END_ID, HIDDEN, PATCH, SIDE, START_ID, VISION_HIDDEN, VOCAB

_MROPE = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}
_QWEN35_ROPE = {
    "type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}
_SIGLIP = {"model_type": "siglip_vision_model"}
_MLA = {"num_key_value_heads": 4}


def _sam(side: int) -> SimpleNamespace:
    """DeepSeek-OCR's first encoder, which has no fields in the config."""
    return SimpleNamespace(
        image_size=side,
        width=16,
        layers=2,
        heads=2,
        patch_size=PATCH,
        window_size=2,
        global_attn_indexes=(1,),
    )


def _encoder(**settings: Any) -> Any:
    """DeepSeek-OCR 2's second encoder, with fewer layers."""
    from mlx_vlm.models.deepseekocr_2.config import Qwen2EncoderConfig

    return Qwen2EncoderConfig(dim=896, layers=1, heads=14, kv_heads=2, intermediate_size=64)


_PHI3_CLIP = SimpleNamespace(
    model_type="phi3_v",
    hidden_size=1024,
    image_size=336,
    intermediate_size=64,
    layer_norm_eps=1e-05,
    num_attention_heads=16,
    num_channels=3,
    num_hidden_layers=2,
    patch_size=14,
)
_DEEPSEEK_TEXT = {
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "num_key_value_heads": 4,
}
_DEEPSEEK_VISION = {
    "model_type": "vision",
    "hidden_size": 1024,
    "layers": 2,
    "width": 1024,
    "num_attention_heads": 16,
    "patch_size": 14,
}
TYPES = {
    "deepseek_vl_v2": Tiny(
        deepseek(6 + 1 + 6),
        {
            "projector_config": {"input_dim": VISION_HIDDEN, "n_embed": HIDDEN},
            "text_config": {"topk_method": "greedy", "scoring_func": "softmax", **_MLA},
            "vision_config": {"model_type": "vision"},
        },
    ),
    "deepseekocr": Tiny(
        deepseek_ocr(273, 256, 1),
        {
            "projector_config": {"input_dim": 2048, "n_embed": HIDDEN},
            "text_config": _DEEPSEEK_TEXT,
            "vision_config": _DEEPSEEK_VISION,
        },
        {"deepseekocr.SAMViTConfig": lambda: _sam(256)},
    ),
    "deepseekocr_2": Tiny(
        deepseek_ocr(257, 256, 1),
        {
            "projector_config": {"input_dim": 896, "n_embed": HIDDEN},
            "text_config": _DEEPSEEK_TEXT,
            "vision_config": {"model_type": "vision", "width": {}},
        },
        {
            "deepseekocr_2.SAMViTConfig": lambda: _sam(256),
            "vision.Qwen2EncoderConfig": _encoder,
        },
    ),
    "jina_vlm": Tiny(
        indexed(SIDE, 3 * PATCH * PATCH),
        {
            "text_config": {
                "hidden_size": HIDDEN,
                "n_layers": 4,
                "additional_vocab_size": 8,
                "vocab_size": VOCAB,
                "block_config": {
                    "attn_config": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16},
                    "ffn_config": {"size": 96},
                },
            },
            "vision_config": {
                "hidden_size": VISION_HIDDEN,
                "n_layers": 2,
                "patch_size": PATCH,
                "input_size": [SIDE, SIDE],
                "vit_layers": [-1, -2],
                "output_size": HIDDEN,
                "block_config": {
                    "attn_config": {"n_heads": 2, "head_dim": 16},
                    "ffn_config": {"size": 64},
                },
                "vl_connector_config": {"mlp_projector_config": {"size": 64}},
            },
        },
    ),
    "minicpmo": Tiny(
        minicpm(None, 4),
        {
            "text_config": {"rope_scaling": _MROPE},
            "vision_config": _SIGLIP,
            "query_num": 4,
            "init_audio": False,
            "init_tts": False,
            "image_size": SIDE,
        },
    ),
    "minicpmv4_6": Tiny(
        minicpm(4),
        {
            "text_config": {"rope_parameters": _QWEN35_ROPE},
            "vision_config": {"num_hidden_layers": 2},
            "insert_layer_id": 0,
            "image_size": SIDE,
        },
    ),
    "minicpmv4_7": Tiny(
        minicpm(4),
        {
            "text_config": {"rope_parameters": _QWEN35_ROPE},
            "vision_config": {"num_hidden_layers": 2},
            "insert_layer_id": 0,
            "image_size": SIDE,
            "image_start_id": START_ID,
            "image_end_id": END_ID,
            "slice_start_id": 294,
            "slice_end_id": 293,
            "newline_id": 292,
        },
    ),
    "molmo": Tiny(
        indexed(SIDE, 3 * PATCH * PATCH),
        {
            "text_config": {
                "n_kv_heads": 2,
                "mlp_hidden_size": 96,
                "embedding_size": VOCAB,
                "additional_vocab_size": 8,
                "vocab_size": VOCAB,
            },
            "vision_config": {
                "image_default_input_size": (SIDE, SIDE),
                "image_patch_size": PATCH,
                "image_pos_patch_size": PATCH,
                "hidden_size": 64,
                "image_emb_dim": 32,
                "image_num_heads": 2,
                "image_num_key_value_heads": 2,
                "image_num_layers": 2,
                "image_head_dim": 16,
                "image_mlp_dim": 64,
                "image_num_pos": 17,
                "d_model": HIDDEN,
                "vit_layers": [-1, -2],
                "intermediate_size": 3 * PATCH * PATCH,
            },
        },
    ),
    "molmo2": Tiny(
        pooled(SIDE, 3 * PATCH * PATCH),
        {
            "text_config": {"additional_vocab_size": 8},
            "vision_config": {
                "vit_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "image_patch_size": PATCH,
                    "image_num_pos": 16,
                    "image_default_input_size": [SIDE, SIDE],
                },
                "adapter_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "text_hidden_size": HIDDEN,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "vit_layers": [-1, -2],
                },
            },
        },
    ),
    "phi3_v": Tiny(
        phi3(),
        {"vision_config": None, "text_config": None},
        {"vision.VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG": _PHI3_CLIP},
    ),
    "unlimited_ocr": Tiny(
        deepseek_ocr(273, 256, 1),
        {
            "projector_config": {"input_dim": 2048, "n_embed": HIDDEN},
            # Less than what is generated.
            "text_config": {**_DEEPSEEK_TEXT, "sliding_window_size": 4},
            "vision_config": _DEEPSEEK_VISION,
        },
        {"deepseekocr.SAMViTConfig": lambda: _sam(256)},
        code="deepseekocr",
    ),
}
