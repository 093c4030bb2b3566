"""Undeclared request fields that cannot change a reply here, by the reason; see ``unsupported``."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: Mapping[str, str] = {
    "identifies the user, or the purpose of a request": """
        user metadata safety_identifier custom_labels user_profile_id workspace_id billing_policy
        session_id
    """,
    "identifies the request; the header `X-Request-Id` does that here": "request_id rid",
    "replaces the header `anthropic-beta`; all its values are accepted": "betas",
    "every prefix is cached": """
        prompt_cache_key prompt_cache_retention prompt_cache_options cache_control cache_prompt
        n_cache_reuse
    """,
    "the server decides how long a model stays loaded": "keep_alive",
    "selects where a request is computed": """
        id_slot data_parallel_rank routed_dp_rank disagg_prefill_dp_rank inference_geo
        backend_sampling
    """,
    "there is only one grammar library": "guided_decoding_backend",
    "sets how often events are sent": "sse_ping_interval stream_interval",
    "no part of a context is ever dropped": "n_keep n_discard",
    "nothing is written between special tokens": "spaces_between_special_tokens",
    "no tools run here": "max_tool_calls",
    "has no meaning without tools": "parallel_tool_calls",
    "all tools are shown to the model from the start": "defer_loading",
    "only has an effect with `dry_multiplier`": """
        dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    """,
    "only has an effect with `xtc_probability`": "xtc_threshold",
    "only has an effect with `mirostat`": "mirostat_tau mirostat_eta",
    "only has an effect with `dynatemp_range`": "dynatemp_exponent",
    "only has an effect with `adaptive_target`": "adaptive_decay",
    "only has an effect with `repeat_penalty`": "repeat_last_n",
    "only has an effect with `return_routed_experts`": """
        routed_experts_start_len routed_experts_prompt_start
    """,
    "only has an effect with `return_flat_raw_output_top_logprobs`": """
        return_flat_raw_top_logprobs_b64
    """,
    "part of an assistant's message that the client sends back": "annotations citations",
}

# Each field's reason.
HARMLESS: Mapping[str, str] = {
    name: reason for reason, names in _REASONS.items() for name in names.split()
}
