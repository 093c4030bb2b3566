"""Values for architectures that the common tiny values do not fit, and model files left out.

The models have few layers; most overrides make each kind of layer occur among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.values import ALTERNATING, HEADS

# Modules of mlx_lm.models without a model.
HELPERS = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)

# Model files that mlx-lm itself cannot run here. The check fails if one of them runs.
NOT_APPLICABLE: dict[str, str] = {
    "bitnet": "its packed ternary layers have a Metal kernel only",
    "muse_spark": "its norm and rotation are a Metal kernel only",
    "phi3small": "it adds a mask of booleans to the scores, so that its prompts are not causal",
    "olmo": "needs the package ai2-olmo, and ends the process on import without it",
}


@dataclass(frozen=True)
class Text:
    """The text model of a multimodal wrapper: its module, dataclass, and values."""

    module: str
    args: str = "ModelArgs"
    values: Mapping[str, Any] = field(default_factory=dict)


_KDA = {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
_DEFAULT_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_ROPE_BY_KIND = {kind: dict(_DEFAULT_ROPE) for kind in dict.fromkeys(ALTERNATING)}
# Queries are scaled by position every 8 tokens, so that short prompts notice it.
_LLAMA4_ROPE = {
    **_DEFAULT_ROPE,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 8,
}
_MLA = {"num_key_value_heads": HEADS}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2, **_MLA},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {"layer_group_size": 2, "n_group": 1, "topk_group": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    },
    "deepseek_v2": {
        "rope_scaling": {
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "mscale_all_dim": 0.7,
        },
        "topk_method": "gready",
    },
    "deepseek_v41": {
        # Some layers make index entries and choose among them, some only choose, some do neither.
        "num_hidden_layers": 6,
        "compress_ratios": (0, 4, 4, 4, 0, 4),
        "kv_source_layer_ids": (1, 5),
        "index_source_layer_ids": (1, 2, 5),
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "index_topk": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma3": {"text_config": Text("gemma3_text")},
    "gemma3n": {
        "text_config": Text(
            "gemma3n",
            "TextConfig",
            {
                "num_kv_shared_layers": 2,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            },
        )
    },
    "gemma4": {"text_config": Text("gemma4_text")},
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 32, "rope_parameters": None},
    "glm_moe_dsa": {"rope_parameters": _DEFAULT_ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "iquestloopcoder": {},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": Text("deepseek_v3")},
    "kimi_k3": {
        "text_config": Text(
            "kimi_k3", "TextArgs", {"hidden_act": "situ", "linear_attn_config": _KDA, **_MLA}
        )
    },
    "kimi_linear": {"linear_attn_config": _KDA, **_MLA},
    "kimi_vl": {"text_config": Text("kimi_vl", "TextArgs", _MLA)},
    "lfm2": {
        **_CONV,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2-vl": {"text_config": Text("lfm2")},
    "lfm2_moe": {**_CONV, "use_expert_bias": True},
    "llama4": {
        "text_config": Text(
            "llama4",
            "TextArgs",
            {
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                # Chunks shorter than a prompt's prefill steps; queries are scaled every 4 tokens.
                "attention_chunk_size": 8,
                "floor_scale": 4,
                "attn_scale": 0.5,
            },
        )
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_split_num": 2},
    "mellum": {"rope_parameters": _ROPE_BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm": {"dim_model_base": 32},
    "minicpm3": {
        "dim_model_base": 32,
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
    "minimax_m3_vl": {
        "text_config": Text(
            "minimax_m3_vl",
            "TextArgs",
            {
                "moe_layer_freq": [0, 1, 1, 1],
                "sparse_attention_freq": [0, 1, 1, 1],
                "index_block_size": 4,
                "index_topk_blocks": 3,
                "index_head_dim": 16,
                "index_n_heads": 2,
                "layer_types": None,
            },
        )
    },
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "mistral3": {"text_config": Text("ministral3")},
    "mistral4": {"rope_parameters": _LLAMA4_ROPE, **_MLA},
    "muse_spark": {
        "text_config": Text(
            "muse_spark",
            "TextArgs",
            {
                "layer_rope_theta": [10_000.0, 0.0] * 2,
                "rope_parameters": _DEFAULT_ROPE,
                "output_multiplier": 1.0,
                "moe_hidden_size": 32,
                "num_shared_experts": 0,
            },
        )
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M", "E", "*"]},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
        "ffn_dim_divisor": 16,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
        "vocab_size": 100_352,  # it writes to the last entries of its original vocabulary
    },
    "pixtral": {"text_config": Text("llama")},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "text_config": Text("qwen3_5", "TextModelArgs", {"hidden_size": 128}),
        "tensor_namespace": "mlx-vlm-qwen3_5",
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
    "qwen2_vl": {"text_config": Text("qwen2")},
    "qwen3_5": {"text_config": Text("qwen3_5", "TextModelArgs")},
    "qwen3_5_moe": {"text_config": Text("qwen3_5", "TextModelArgs")},
    "qwen3_vl": {"text_config": Text("qwen3")},
    "qwen3_vl_moe": {"text_config": Text("qwen3_moe")},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": _ROPE_BY_KIND},
}
