"""Types whose images have one size, perhaps in tiles of it."""

from __future__ import annotations

from support.vision.tiny_vision import CONFIGS

from conformance.vision.forms import square
from conformance.vision.special_forms import (
    anyres,
    idefics,
    image_types,
    patches,
    soft_tokens,
    with_sides,
)
from conformance.vision.tiny import Tiny
from conformance.vision.values import HIDDEN, PATCH, SIDE, VISION_HIDDEN

_SIGLIP = {"model_type": "siglip_vision_model"}
_CLIP = {"model_type": "clip_vision_model"}
_MLA = {"num_key_value_heads": 4}

TYPES = {
    "aya_vision": Tiny(
        square(4, tiles=3),
        {
            "text_config": {"sliding_window_pattern": 2},
            "vision_config": _SIGLIP,
            "alignment_intermediate_size": 64,
        },
    ),
    "fastvlm": Tiny(
        square(1, 64, contracted=1, most=1),
        # Twice the last width of the tower.
        {"text_config": {"model_type": "qwen2"}, "mm_hidden_size": 256},
        {
            "config.VisionConfig.layers": [1] * 5,
            "config.VisionConfig.embed_dims": [8, 16, 32, 64, 128],
        },
    ),
    "gemma3": Tiny(square(4), CONFIGS["gemma3"]),
    "gemma4": Tiny(
        square(4, derived=image_types),
        {
            "text_config": {
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "rope_parameters": None,
                "use_bidirectional_attention": "vision",
                "enable_moe_block": False,
            },
            "vision_config": {
                "pooling_kernel_size": 2,
                "layer_types": None,
                "head_dim": 16,
                "position_embedding_size": 64,
                "default_output_length": 4,
                "global_head_dim": 16,
            },
            "audio_config": None,
            "vision_soft_tokens_per_image": 4,
        },
    ),
    "gemma4_unified": Tiny(
        soft_tokens(9),
        {
            "text_config": {
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "rope_parameters": None,
                "use_bidirectional_attention": "vision",
            },
            "audio_config": None,
            "vision_config": {
                "model_patch_size": 4,
                "mm_embed_dim": 32,
                "mm_posemb_size": 64,
                "output_proj_dims": 32,
            },
        },
    ),
    "got": Tiny(
        square(16, 64, channels_last=True, most=1),
        {
            "vision_config": {
                "img_size": 64,
                "out_chans": 16,
                "out_dim": 1024,
                "window_size": 2,
                "global_attn_indexes": (1,),
            }
        },
    ),
    "granite4_vision": Tiny(
        square(32, axes=5, most=1),
        {
            "vision_config": {**_SIGLIP, "hidden_size": 64, "num_attention_heads": 4},
            "deepstack_layer_map": [[-2, 0], [-1, 1]],
            "spatial_target_layers": [2, 3, 1, 0],
            "downsample_rate": "2/4",
            "spatial_vision_layer": -1,
        },
    ),
    "granite_vision": Tiny(square(32, axes=5, contracted=5, most=1), {"vision_config": _SIGLIP}),
    "idefics2": Tiny(
        idefics(4),
        {
            "vision_config": {"model_type": "idefics2"},
            "perceiver_config": {
                "model_type": "idefics2",
                "num_key_value_heads": 1,
                "resampler_depth": 2,
                "resampler_head_dim": 16,
                "resampler_n_heads": 2,
                "resampler_n_latents": 4,
            },
        },
    ),
    "idefics3": Tiny(idefics(4, "pixel_attention_mask"), CONFIGS["idefics3"]),
    "inkling": Tiny(
        patches(3),
        {
            "text_config": {
                "layer_types": ["hybrid_sliding", "hybrid"] * 2,
                "d_rel": 8,
                "rel_extent": 32,
                "dense_mlp_idx": 1,
                "route_scale": 1.0,
                "mlp_layer_types": None,
            },
        },
    ),
    "internvl": Tiny(square(4, tiles=3), CONFIGS["internvl"]),
    "internvl_chat": Tiny(square(4, tiles=3), CONFIGS["internvl_chat"]),
    "llama4": Tiny(
        square(4, tiles=3),
        {
            "text_config": {
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 8,
                "floor_scale": 4,
                "attn_scale": 0.5,
                "no_rope_layers": [1, 1, 1, 0],
            },
            "vision_config": {
                "initializer_range": 0.02,
                "pixel_shuffle_ratio": 0.5,
                "projector_dropout": 0.0,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "intermediate_size": 128,
                "rope_theta": 10_000.0,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
                "vision_output_dim": 64,
            },
        },
    ),
    "llava": Tiny(square(16), CONFIGS["llava"]),
    "llava_bunny": Tiny(
        square(729, 27 * PATCH, contracted=1, most=1),
        {
            "vision_config": {**_SIGLIP, "image_size": 27 * PATCH},
            "auto_map": {},
        },
    ),
    "llava_next": Tiny(
        square(34, axes=5, contracted=5, most=1),
        {"vision_config": _CLIP, "text_config": {"model_type": "llama"}},
    ),
    "llava_onevision": Tiny(
        anyres(36),
        {
            "vision_config": _SIGLIP,
            "text_config": {"model_type": "qwen2"},
            "image_grid_pinpoints": [[SIDE, SIDE]],
        },
    ),
    "llmjpvl": Tiny(square(4, tiles=3)),
    "mistral3": Tiny(with_sides(4), CONFIGS["mistral3"]),
    "moondream2": Tiny(
        square(16, lead=1, channels_last=True, most=1, before=()),
        {
            "vision_config": {"proj_inner_dim": 64, "proj_out_dim": HIDDEN, "overlap_margin": 1},
            "text_config": {"num_key_value_heads": 4, "rope_dim": 8},
        },
    ),
    "moondream3": Tiny(
        square(16, lead=1, channels_last=True, most=1, before=()),
        {
            "vision_config": {"proj_inner_dim": 64, "proj_out_dim": HIDDEN, "overlap_margin": 1},
            "text_config": {"num_key_value_heads": 4, "rope_dim": 8},
        },
    ),
    "multi_modality": Tiny(
        square(16, contracted=1, most=1),
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "vision", "cls": "CLIPVisionTower", "params": {}},
            "projector_config": {
                "cls": "MlpProjector",
                "model_type": "x",
                "params": {
                    "depth": 2,
                    "input_dim": VISION_HIDDEN,
                    "n_embed": HIDDEN,
                    "projector_type": "mlp_gelu",
                },
            },
            "num_image_tokens": 16,
        },
    ),
    "nemotron_h_nano_omni": Tiny(
        square(4, tiles=3),
        {
            "text_config": {"hybrid_override_pattern": ["M", "*", "-", "M", "E", "*"]},
            "vit_hidden_size": VISION_HIDDEN,
            "projector_hidden_size": 64,
            "vision_config": {"max_resolution": 64},
        },
    ),
    "paligemma": Tiny(
        square(16, whole=True, lead=0, most=1, before=()),
        {"text_config": {"model_type": "gemma"}, "vision_config": _SIGLIP},
    ),
    "pixtral": Tiny(square(16), CONFIGS["pixtral"]),
    "plamo2vl": Tiny(
        square(16, tiles=2),
        {
            "vision_config": {
                **_SIGLIP,
                "image_feature_size": VISION_HIDDEN,
                "image_proj_hidden_size": 64,
            },
        },
    ),
    "smolvlm": Tiny(idefics(4, "pixel_attention_mask"), CONFIGS["smolvlm"]),
    "step3p7": Tiny(square(4, 32), {"vision_config": {"image_size": 32}}),
}
