"""Types whose caches are of mlx-vlm's own kinds."""

from __future__ import annotations

from conformance.vision.forms import grid
from conformance.vision.tiny import Tiny

_QWEN35_ROPE = {
    "type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}
# The choices are so small that they drop tokens of most prompts.
TYPES = {
    "glm5_next": Tiny(
        grid(),
        {
            "text_config": {
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "indexer_types": ["full", "full", "full", "shared"],
                "mlp_layer_types": None,
                "linear_head_dim": 16,
                "linear_num_heads": 4,
                "qk_rope_head_dim": 0,
                "index_kpool": 4,
                "hc_mult": 2,
                "num_key_value_heads": 4,
            },
            "vision_config": {"projection_intermediate_size": 64},
        },
    ),
    "minimax_m3_vl": Tiny(
        grid(),
        {
            "text_config": {
                "moe_layer_freq": [0, 1, 1, 1],
                "sparse_attention_config": {
                    "use_sparse_attention": True,
                    "sparse_attention_freq": [0, 1, 1, 1],
                    "sparse_index_dim": 16,
                    "sparse_num_index_heads": 4,
                    "sparse_block_size": 4,
                    "sparse_topk_blocks": 3,
                    "sparse_init_block": 1,
                    "sparse_local_block": 1,
                },
            },
            "projector_hidden_size": 64,
        },
    ),
    "qwen4_exp": Tiny(
        grid(),
        {
            "text_config": {
                "rope_parameters": _QWEN35_ROPE,
                "layer_types": None,
                "hc_count": 2,
                "hc_lowrank": 8,
                "ple_layer_ids": [1],
                "ple_embed_dim": 16,
                "heads_per_ngram": 2,
                "ngram_vocab_size_base": 50,
                "make_ngram_vocab_size_divisible_by": 8,
                "split_ngram_parts": 2,
                "eos_token_id": 1,
                "indexer_n_heads": 16,
                "indexer_head_dim": 16,
                "indexer_budget": 12,
                "indexer_compress_ratio": 4,
            },
            "vision_config": {"deepstack_visual_indexes": []},
        },
    ),
}
