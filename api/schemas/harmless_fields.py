"""Undeclared request fields that cannot change a reply here, by the reason; see ``unsupported``."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: Mapping[str, str] = {
    "says who asks, and what for": """
        user metadata safety_identifier custom_labels user_profile_id workspace_id billing_policy
        session_id
    """,
    "names the request; here the header `X-Request-Id` does": "request_id rid",
    "names what the header `anthropic-beta` does, and any is taken": "betas",
    "every prefix is cached, and found again": """
        prompt_cache_key prompt_cache_retention prompt_cache_options cache_control cache_prompt
        n_cache_reuse
    """,
    "models stay loaded": "keep_alive",
    "says where it is computed": """
        id_slot data_parallel_rank routed_dp_rank disagg_prefill_dp_rank inference_geo
        backend_sampling
    """,
    "there is one library for grammars": "guided_decoding_backend",
    "says how often events are sent": "sse_ping_interval stream_interval",
    "nothing of a context is ever dropped": "n_keep n_discard",
    "no tools run here": "max_tool_calls",
    "one call or several make no difference where there are no tools": "parallel_tool_calls",
    "all tools are shown at once": "defer_loading",
    "goes with `dry_multiplier`": """
        dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    """,
    "goes with `xtc_probability`": "xtc_threshold",
    "goes with `mirostat`": "mirostat_tau mirostat_eta",
    "goes with `dynatemp_range`": "dynatemp_exponent",
    "goes with `adaptive_target`": "adaptive_decay",
    "goes with `repeat_penalty`": "repeat_last_n",
    "goes with `return_routed_experts`": "routed_experts_start_len routed_experts_prompt_start",
    "goes with `return_flat_raw_output_top_logprobs`": "return_flat_raw_top_logprobs_b64",
    "is part of an assistant's message that comes back": "annotations citations",
}

# Each field's reason.
HARMLESS: Mapping[str, str] = {
    name: reason for reason, names in _REASONS.items() for name in names.split()
}
