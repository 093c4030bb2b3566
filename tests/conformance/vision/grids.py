"""Types whose images are a list of patches with their number in time, height and width."""

from __future__ import annotations

from support.vision.tiny_vision import CONFIGS

from conformance.vision.forms import grid
from conformance.vision.special_forms import framed, plane, sized
from conformance.vision.tiny import Tiny
from conformance.vision.values import END_ID, HIDDEN, IMAGE_ID, PATCH, START_ID, VISION_HIDDEN

_MROPE = {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}
_QWEN35_ROPE = {
    "type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}
_MLA = {"num_key_value_heads": 4}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_NO_DEEPSTACK = {"deepstack_visual_indexes": []}

TYPES = {
    "cohere_compass": Tiny(
        grid(),
        {
            "text_config": {
                "rope_parameters": {"rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            },
        },
    ),
    "dots_ocr": Tiny(
        grid(3 * PATCH * PATCH),
        {
            "vision_config": {
                "temporal_patch_size": 1,
                "model_type": "dots_vit",
                "hidden_size": HIDDEN,
                "embed_dim": HIDDEN,
            }
        },
    ),
    "ernie4_5_moe_vl": Tiny(
        grid(3 * PATCH * PATCH),
        {
            "text_config": {
                "moe_num_experts": [4, 4],
                "moe_intermediate_size": [32, 32],
                "moe_layer_start_index": [1, 1],
                "moe_layer_end_index": [3, 3],
                "moe_num_shared_experts": 1,
                "moe_k": 2,
                "mrope_section": [3, 3, 2],
                "rope_scaling": None,
            },
            "im_patch_id": IMAGE_ID,
            "pixel_hidden_size": VISION_HIDDEN,
            "hidden_size": HIDDEN,
            "vision_start_token_id": START_ID,
            "image_start_token_id": START_ID,
        },
    ),
    "falcon_ocr": Tiny(
        # Special tokens in front of the image see it, too.
        plane(before=(START_ID, 7, 8)),
        {
            "spatial_patch_size": PATCH,
            "image_cls_token_id": START_ID,
            "img_end_id": END_ID,
        },
    ),
    "glm4v": Tiny(
        grid(),
        {
            "text_config": {"rope_scaling": _MROPE, "partial_rotary_factor": 1.0, "head_dim": 16},
            "vision_config": {"model_type": "glm4v"},
        },
    ),
    "glm4v_moe": Tiny(
        grid(),
        {
            "text_config": {"rope_scaling": _MROPE, "partial_rotary_factor": 1.0},
            "vision_config": {"model_type": "glm4v_moe"},
        },
    ),
    "glm_ocr": Tiny(
        grid(),
        {
            "text_config": {
                "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0, "rope_theta": 10_000.0}
            },
        },
    ),
    "hunyuan_vl": Tiny(
        framed(3 * PATCH * PATCH),
        {
            "text_config": {
                "rope_scaling": {
                    "alpha": 10.0,
                    "factor": 1.0,
                    "type": "xdrope",
                    "xdrope_section": [2, 2, 2, 2],
                },
                "attention_head_dim": 16,
            },
            "vision_config": {"max_image_size": 64},
        },
    ),
    "kimi_k25": Tiny(grid((3, PATCH, PATCH), "image_grid_hws", 2), {"text_config": _MLA}),
    "kimi_k3": Tiny(
        grid((3, PATCH, PATCH), "grid_thws"),
        {
            "text_config": {
                "hidden_act": "situ",
                "linear_attn_config": {
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2, 4],
                    "num_heads": 4,
                    "head_dim": 16,
                    "short_conv_kernel_size": 4,
                    "gate_lower_bound": -5.0,
                },
                "attn_res_block_size": 2,
                **_MLA,
            },
            "vision_config": {
                "vt_num_attention_heads": 2,
                "vt_num_hidden_layers": 2,
                "vt_hidden_size": VISION_HIDDEN,
                "vt_intermediate_size": 64,
                "qkv_hidden_size": 48,
                "mm_hidden_size": VISION_HIDDEN,
                "text_hidden_size": HIDDEN,
            },
        },
    ),
    "kimi_vl": Tiny(grid((3, PATCH, PATCH), "image_grid_hws", 2), {"text_config": _MLA}),
    "lfm2_vl": Tiny(
        sized(3 * PATCH * PATCH),
        {
            "text_config": {
                **_CONV,
                "block_auto_adjust_ff_dim": False,
                "conv_dim": HIDDEN,
                "conv_dim_out": HIDDEN,
                "block_dim": HIDDEN,
                "conv_L_cache": 3,
            },
            "vision_config": {"num_patches": 64},
            "projector_hidden_size": 64,
        },
    ),
    "locateanything": Tiny(
        grid((3, PATCH, PATCH), "image_grid_hws", 2), {"text_config": {"model_type": "qwen2"}}
    ),
    "mage_vl": Tiny(
        grid(3 * PATCH * PATCH),
        {"vision_config": {"temporal_patch_size": 1, "hidden_size": 64, "num_attention_heads": 2}},
    ),
    "mimo_v2": Tiny(
        grid(),
        {
            "text_config": {
                "hybrid_layer_pattern": [1, 0, 1, 0],
                "moe_layer_freq": [0, 1, 1, 1],
                "add_swa_attention_sink_bias": True,
                "attention_projection_layout": None,
                "v_head_dim": 16,
                "swa_v_head_dim": 16,
            },
            "vision_config": {
                "num_query_groups": 1,
                "vit_window_attn_types": [0, -1],
                "visual_token_window_size": 2,
                "num_key_value_heads": 2,
                "num_heads": 2,
            },
            "audio_config": {
                "input_local_dim": 16,
                "input_local_layers": 1,
                "input_local_attn_heads": 1,
                "input_local_head_dim": 16,
                "input_local_intermediate_size": 16,
                "out_hidden_size": HIDDEN,
                "audio_channels": 2,
            },
        },
    ),
    "muse_glimmer": Tiny(grid(), {"projector_hidden_size": 64, "out_hidden_size": 128}),
    "paddleocr_vl": Tiny(
        grid((3, PATCH, PATCH), batched=True),
        {
            "text_config": {
                "rope_scaling": _MROPE,
                "use_bias": False,
                "head_dim": 16,
                "hidden_size": 1024,  # the projection's, which is no field
            },
        },
    ),
    "phi4_siglip": Tiny(
        sized(3 * PATCH * PATCH, merge=1, contracted=1, mark=-200),
        {"vision_config": {"num_patches": 64}},
    ),
    "phi4mm": Tiny(
        sized(3 * PATCH * PATCH, merge=1, contracted=1),
        {
            "audio_processor": {
                "config": {
                    "attention_dim": 16,
                    "attention_heads": 2,
                    "num_blocks": 1,
                    "linear_units": 16,
                    "ext_pw_out_channel": 16,
                    "depthwise_seperable_out_channel": 16,
                    "conv_channels": 16,
                }
            },
        },
    ),
    "prism_hadamard_qwen35": Tiny(
        grid(),
        {
            "text_config": {"rope_parameters": _QWEN35_ROPE, "hidden_size": 128},
            "vision_config": {**_NO_DEEPSTACK, "out_hidden_size": 128},
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [
                {
                    "path": "model.layers.1.self_attn.q_proj",
                    "block": 0,
                    "embedding": False,
                    "dtype": "float16",
                }
            ],
        },
    ),
    "qwen2_5_vl": Tiny(grid(), CONFIGS["qwen2_5_vl"]),
    "qwen2_vl": Tiny(grid(), CONFIGS["qwen2_vl"]),
    "qwen3_5": Tiny(
        grid(),
        {
            "text_config": {"rope_parameters": _QWEN35_ROPE},
            "vision_config": _NO_DEEPSTACK,
        },
    ),
    "qwen3_5_moe": Tiny(
        grid(),
        {
            "text_config": {"rope_parameters": _QWEN35_ROPE},
            "vision_config": _NO_DEEPSTACK,
        },
    ),
    "qwen3_omni_moe": Tiny(
        grid(),
        {
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": {
                    **CONFIGS["qwen3_vl_moe"]["text_config"],
                    "model_type": "qwen3_omni_moe_text_encoder",
                    "sliding_window": None,
                },
                "vision_config": {
                    **CONFIGS["qwen3_vl"]["vision_config"],
                    "model_type": "qwen3_omni_moe_vision_encoder",
                },
                "audio_config": {
                    "d_model": 32,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 32,
                    "num_hidden_layers": 1,
                    "output_dim": HIDDEN,
                    "downsample_hidden_size": 8,
                    "num_mel_bins": 16,
                },
                "image_token_id": IMAGE_ID,
                "video_token_id": 296,
                "audio_token_id": 295,
                "vision_start_token_id": START_ID,
                "vision_end_token_id": END_ID,
            },
            "talker_config": {
                "text_config": CONFIGS["qwen3_vl_moe"]["text_config"],
                "code_predictor_config": {},
            },
            "code2wav_config": {},
            "text_config": None,
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "qwen3_vl": Tiny(grid(), CONFIGS["qwen3_vl"]),
    "qwen3_vl_moe": Tiny(grid(), CONFIGS["qwen3_vl_moe"]),
    "youtu_vl": Tiny(
        grid(3 * PATCH * PATCH, "spatial_shapes", 2),
        {"text_config": _MLA, "vision_config": {"num_patches": 64}},
    ),
    "zaya1_vl": Tiny(
        grid(unchunked=True),
        {
            "text_config": {"num_query_groups": 2, "zaya_mlp_expansion": 16, "ffn_hidden_size": 64},
        },
    ),
}
