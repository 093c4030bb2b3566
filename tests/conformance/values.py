"""Tiny config values by field name, for all architectures."""

from __future__ import annotations

from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 4, 2, 16, 4, 128
WINDOW = 12
EXPERTS = 4
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# The smallest size of heads for which there are kernels over pages.
PAGED_HEAD_DIM = 64
_WIDTHS = "hidden_size hidden_dim d_model n_embd model_dim block_dim"
_HEAD_DIMS = "head_dim hidden_size_per_head kv_channels swa_head_dim"

# Other fields keep their defaults. A field without a default is an error until it is added here.
VALUES: dict[str, Any] = {
    **_all("vocab_size vocab_size_per_layer_input num_vocab", VOCAB),
    # Widths.
    **_all(_WIDTHS, HIDDEN),
    **_all("intermediate_size intermediate_size_mlp n_inner ffn_hidden_size", 96),
    **_all("ff_intermediate_size dense_intermediate_size", 96),
    **_all("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", 32),
    **_all("moe_shared_expert_intermediate_size shared_intermediate_size share_expert_dim", 32),
    "hidden_size_per_layer_input": 8,
    # Layers and heads.
    **_all("num_hidden_layers num_layers n_layer n_layers num_transformer_layers", LAYERS),
    **_all("num_attention_heads num_heads n_head n_heads", HEADS),
    **_all("num_key_value_heads num_kv_heads n_kv_heads num_attention_groups", KV_HEADS),
    **_all("swa_num_attention_heads num_swa_attention_heads", HEADS),
    **_all("swa_num_key_value_heads num_swa_key_value_heads", KV_HEADS),
    **_all(_HEAD_DIMS, HEAD_DIM),
    **_all("linear_num_key_heads mamba_n_groups n_groups", 2),
    **_all("linear_num_value_heads mamba_n_heads mamba_num_heads", 4),
    **_all("linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim", 16),
    # Recurrent layers.
    **_all("mamba_d_state ssm_state_size state_size", 8),
    **_all("mamba_d_conv linear_conv_kernel_dim conv_kernel conv1d_width conv_L_cache", 4),
    **_all("time_step_limit", (0.001, 100.0)),
    "short_conv_kernel_size": 4,
    "time_step_rank": 8,
    # Multi-head latent attention and low ranks.
    **_all("kv_lora_rank q_lora_rank", 16),
    **_all("qk_nope_head_dim qk_rope_head_dim", 8),
    **_all("v_head_dim swa_v_head_dim", 16),
    **_all("a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim", 8),
    # A sparse-attention indexer, so small that it drops tokens. Its heads score by ReLU: with few
    # heads many tokens would score 0, and the choice among them would be arbitrary.
    **_all("index_n_heads", 16),
    **_all("index_head_dim", 16),
    **_all("index_topk", 8),
    # Windows.
    **_all("sliding_window sliding_window_size window_size attention_window_size", WINDOW),
    **_all("loop_window_size attention_chunk_size", WINDOW),
    **_all("sliding_window_pattern full_attention_interval", 2),
    **_all("layer_types", ALTERNATING),
    # Experts. One group, so that group limits drop none; some architectures override it.
    **_all("num_experts n_routed_experts num_local_experts moe_num_experts", EXPERTS),
    **_all("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts", 2),
    **_all("n_shared_experts num_shared_experts num_shared_expert", 1),
    **_all("first_k_dense_replace num_dense_layers", 1),
    **_all("n_group topk_group moe_layer_freq decoder_sparse_step", 1),
    **_all("mlp_only_layers", []),
    **_all("routed_scaling_factor", 1.0),
    **_all("scoring_func", "sigmoid"),
    **_all("topk_method", "noaux_tc"),
    # Positions.
    **_all("max_position_embeddings n_positions n_ctx block_size model_max_length", 512),
    **_all("rope_theta rotary_emb_base swa_rope_theta rope_local_base_freq", 10_000.0),
    **_all("partial_rotary_factor rotary_pct", 0.5),
    **_all("rotary_dim", 8),
    **_all("rope_scaling rope_parameters", None),
    # Multipliers.
    **_all("logits_scaling embedding_multiplier residual_multiplier attention_multiplier", 1.0),
    **_all("scale_depth scale_emb", 1.0),
    **_all("query_pre_attn_scalar", 16),
    **_all("final_logit_softcapping logits_soft_cap attn_logit_softcapping", 30.0),
    # Norms; published models have similar values.
    **_all("rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon", 1e-5),
    "post_norm_eps": 1e-5,
    # Switches without a default.
    **_all("attention_bias mlp_bias use_bias use_qkv_bias bias conv_bias mamba_proj_bias", False),
    **_all("tie_word_embeddings post_norm", False),
    **_all("use_conv_bias mamba_conv_bias use_qk_norm qk_norm norm_topk_prob", True),
    **_all("hidden_act", "silu"),
}


def widen() -> None:
    """Gives all models heads of ``PAGED_HEAD_DIM``."""
    VALUES.update(_all(_WIDTHS, HEADS * PAGED_HEAD_DIM) | _all(_HEAD_DIMS, PAGED_HEAD_DIM))
