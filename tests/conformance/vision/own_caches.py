"""Types whose caches are of mlx-vlm's own kinds."""

from __future__ import annotations

from typing import Any

from conformance.vision.forms import grid
from conformance.vision.special_forms import deepseek_records
from conformance.vision.tiny import Tiny
from conformance.vision.values import MERGE, PATCH, VISION_HIDDEN, VOCAB

_QWEN35_ROPE = {
    "type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}


def _hash_tokens(model: Any) -> None:
    """Gives DeepSeek-V4.1 a table of tokens for its n-grams, which is a file of its models."""
    from mlx_vlm.models.deepseek_v41.engram import NgramHashState

    if model.engram_hash is None:
        tokens = [token % 150 for token in range(VOCAB)]
        model.engram_hash = NgramHashState(model.config, model.layout, token_map=tokens)


# The choices are so small that they drop tokens of most prompts.
TYPES = {
    # Some layers make groups and choose among them, some only choose, some do neither.
    "deepseek_v41": Tiny(
        deepseek_records(),
        {
            "num_hidden_layers": 6,
            "compress_ratios": [0, 2, 2, 1, 1, 1],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3, 4],
            "candidate_source_layer_id": 3,
            "candidate_topk_blocks": 4,
            "candidate_block_size": 4,
            "head_dim": 32,
            "index_head_dim": 32,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 32,
            "hc_mult": 2,
            "scoring_func": "sqrtsoftplus",
            "engram_layer_ids": [1, 3],
            "engram_num_embeddings": [256, 320],
            "engram_max_ngram_size": 3,
            "engram_vocab_size": 50,
            "engram_n_heads": 2,
            "engram_head_dim": 16,
            "engram_compressed_vocab_size": 150,
            "vision_num_layers": 2,
            "vision_hidden_size": VISION_HIDDEN,
            "vision_num_heads": 2,
            "vision_intermediate_size": 64,
            "vision_patch_size": PATCH,
            "vision_downsample_ratio": MERGE,
        },
        {
            "language.LanguageModel._ensure_engram_hash": _hash_tokens,
            # Rounding activations to 4 bits makes large differences of those in a last bit.
            "fakequant.DISABLE": True,
        },
    ),
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
