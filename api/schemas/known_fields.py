"""Request fields known to other servers and APIs, by API and server.

Taken from the request schemas of openai 3.54, anthropic 2.12, vLLM 0.33, SGLang 0.5.23, llama.cpp
b11434, mlx-lm 0.32.2 and Ollama (August 2026, with the fields of its own API); "vLLM, older" are
names that vLLM accepted until 0.11 and clients still send. ``unsupported`` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Api = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "infill",
    "ollama_chat",
    "ollama_generate",
    "ollama_embed",
]

_TEXTS: Mapping[Api, Mapping[str, str]] = {
    "chat": {
        "OpenAI": """
            audio frequency_penalty function_call functions logit_bias logprobs
            max_completion_tokens max_tokens messages metadata modalities model moderation n
            parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
            prompt_cache_retention reasoning_effort response_format safety_identifier seed
            service_tier stop store stream stream_options temperature tool_choice tools top_logprobs
            top_p user verbosity web_search_options
        """,
        "vLLM": """
            add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt
            chat_template chat_template_kwargs continue_final_message documents ec_transfer_params
            echo frequency_penalty ignore_eos include_reasoning include_stop_str_in_output
            kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
            max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload
            mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
            prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
            response_format return_mm_kwargs return_prompt_text return_token_ids
            return_token_offsets return_tokens_as_token_ids return_weight_versions
            routed_experts_prompt_start seed session_id skip_special_tokens
            spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
            structured_outputs temperature thinking_token_budget tool_choice tools top_k
            top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user
            vllm_xargs watermarking
        """,
        "vLLM, older": """
            best_of guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
            guided_whitespace_pattern logits_processors structural_tag
        """,
        "SGLang": """
            bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
            continue_final_message custom_logit_processor custom_params data_parallel_rank
            disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config
            input_ids logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch
            max_tokens messages min_dynamic_patch min_p min_tokens mm_processor_kwargs model n
            no_stop_trim parallel_tool_calls presence_penalty priority reasoning_effort regex
            repetition_penalty response_format return_cached_tokens_details
            return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
            return_hidden_states return_input_ids_in_sglext return_meta_info
            return_output_ids_in_sglext return_prompt_token_ids return_routed_experts
            return_sampling_mask return_spec_tokens_details return_token_ids rid routed_dp_rank
            routed_experts_start_len sampling_logprobs_mode seed separate_reasoning session_id
            session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options
            stream_reasoning task temperature thinking tool_choice tools top_k top_logprobs top_p
            use_audio_in_video user video_config watermark
        """,
        "llama.cpp": """
            adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt
            chat_format chat_parser chat_template_kwargs continue_final_message dry_allowed_length
            dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
            dynatemp_range echo frequency_penalty generation_prompt grammar grammar_lazy
            grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias logprobs lora
            max_completion_tokens max_tokens messages min_keep min_p mirostat mirostat_eta
            mirostat_tau model n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs
            parallel_tool_calls parse_tool_calls post_sampling_probs presence_penalty
            preserved_tokens reasoning_budget_end_tag reasoning_budget_end_tags
            reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens
            reasoning_control reasoning_effort reasoning_format repeat_last_n repeat_penalty
            response_fields response_format return_progress return_tokens samplers seed
            sse_ping_interval stop stream stream_options t_max_predict_ms temperature
            thinking_budget_tokens timings_per_token tool_choice tools top_k top_logprobs
            top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
        """,
        "mlx-lm": """
            adapters chat_template_kwargs draft_model frequency_context_size frequency_penalty
            logit_bias logprobs max_completion_tokens max_tokens messages min_p model
            num_draft_tokens presence_context_size presence_penalty repetition_context_size
            repetition_penalty role_mapping seed stop stream stream_options temperature tools top_k
            top_logprobs top_p xtc_probability xtc_threshold
        """,
        "Ollama": """
            _debug_render_only format frequency_penalty keep_alive logprobs max_tokens messages
            model options presence_penalty reasoning reasoning_effort response_format seed shift
            stop stream stream_options temperature think tools top_logprobs top_p truncate
        """,
    },
    "completions": {
        "OpenAI": """
            best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty
            prompt seed stop stream stream_options suffix temperature top_p user
        """,
        "vLLM": """
            add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
            frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params
            length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens
            mm_payload model n presence_penalty priority prompt prompt_embeds prompt_logprobs
            repetition_detection repetition_penalty request_id response_format return_mm_kwargs
            return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
            routed_experts_prompt_start seed session_id skip_special_tokens
            spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
            structured_outputs suffix temperature thinking_token_budget top_k top_p
            truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
        """,
        "vLLM, older": """
            best_of guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
            guided_whitespace_pattern logits_processors structural_tag
        """,
        "SGLang": """
            best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels
            custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo
            extra_key frequency_penalty ignore_eos images_config json_schema logit_bias logprobs
            lora_path max_tokens min_p min_tokens mm_processor_kwargs model n no_stop_trim
            presence_penalty priority prompt regex repetition_penalty response_format
            return_cached_tokens_details return_hidden_states return_routed_experts
            return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len
            seed session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream
            stream_options suffix temperature top_k top_p user watermark
        """,
        "llama.cpp": """
            adaptive_decay adaptive_target backend_sampling best_of cache_prompt chat_format
            chat_parser continue_final_message dry_allowed_length dry_base dry_multiplier
            dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo
            frequency_penalty generation_prompt grammar grammar_lazy grammar_triggers grammar_type
            id_slot ignore_eos json_schema logit_bias logprobs lora max_completion_tokens max_tokens
            min_keep min_p mirostat mirostat_eta mirostat_tau model n n_cache_reuse n_cmpl n_discard
            n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs presence_penalty
            preserved_tokens prompt reasoning_budget_end_tag reasoning_budget_end_tags
            reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens
            reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
            return_progress return_tokens samplers seed sse_ping_interval stop stream stream_options
            suffix t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p typical_p
            verbose xtc_probability xtc_threshold
        """,
        "mlx-lm": """
            adapters draft_model frequency_context_size frequency_penalty logit_bias logprobs
            max_completion_tokens max_tokens min_p model num_draft_tokens presence_context_size
            presence_penalty prompt repetition_context_size repetition_penalty seed stop stream
            stream_options temperature top_k top_logprobs top_p xtc_probability xtc_threshold
        """,
        "Ollama": """
            _debug_render_only context format frequency_penalty images keep_alive logprobs
            max_tokens model options presence_penalty prompt raw seed shift stop stream
            stream_options suffix system temperature template think top_logprobs top_p truncate
        """,
    },
    "responses": {
        "OpenAI": """
            access_programs background background_options context_management conversation image
            include input instructions max_output_tokens max_tool_calls metadata model moderation
            parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options
            prompt_cache_retention reasoning safety_identifier service_tier store stream
            stream_options temperature text tool_choice tools top_logprobs top_p truncation user
        """,
        "vLLM": """
            background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages
            frequency_penalty ignore_eos include include_reasoning include_stop_str_in_output input
            instructions kv_transfer_params logit_bias max_output_tokens max_tool_calls
            media_io_kwargs metadata min_p mm_payload mm_processor_kwargs model parallel_tool_calls
            presence_penalty previous_input_messages previous_response_id priority prompt
            prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
            repetition_penalty request_id return_mm_kwargs safety_identifier seed service_tier
            session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids store
            stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p
            truncation user vllm_xargs watermarking
        """,
        "SGLang": """
            background bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
            data_parallel_rank disagg_prefill_dp_rank extra_key frequency_penalty include input
            instructions max_output_tokens max_tool_calls metadata min_p model parallel_tool_calls
            presence_penalty previous_response_id priority reasoning repetition_penalty request_id
            routed_dp_rank service_tier session_id stop store stream temperature text tool_choice
            tools top_k top_logprobs top_p truncation user
        """,
        "llama.cpp": """
            input instructions max_output_tokens model previous_response_id reasoning stream
            temperature tools top_p
        """,
        "Ollama": """
            background conversation include input instructions max_output_tokens model reasoning
            stream temperature text tools top_p truncation
        """,
    },
    "messages": {
        "Anthropic": """
            betas billing_policy cache_control compaction container context_management diagnostics
            fallback_credit_token fallbacks inference_geo max_tokens mcp_servers messages metadata
            model output_config service_tier speed stop_sequences stream system thinking thread
            tool_choice tools user_profile_id workspace_id
        """,
        "Anthropic, beta": "output_format",
        "vLLM": """
            cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens
            messages metadata mm_payload model output_config return_mm_kwargs stop_sequences stream
            system temperature thinking tool_choice tools top_k top_p vllm_xargs watermarking
        """,
        "SGLang": """
            betas max_tokens messages metadata model output_config stop_sequences stream system
            temperature thinking tool_choice tools top_k top_p
        """,
        "llama.cpp": """
            max_tokens messages metadata model stop_sequences stream system temperature thinking
            tool_choice tools top_k top_p
        """,
    },
    "embeddings": {
        "Chairlift": "normalize pooling",
        "OpenAI": """
            dimensions encoding_format input model user
        """,
        "vLLM": """
            add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
            continue_final_message dimensions embed_dtype encoding_format endianness input
            media_io_kwargs messages mm_processor_kwargs model padding priority request_id
            truncate_prompt_tokens truncation_side use_activation user
        """,
        "SGLang": """
            dimensions embed_override_token_id embed_overrides encoding_format input lora_path model
            priority rid user
        """,
        "llama.cpp": """
            content embd_normalize encoding_format input model
        """,
        "Ollama": """
            dimensions encoding_format input keep_alive model options truncate
        """,
    },
    "infill": {
        "llama.cpp": """
            adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base
            dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
            frequency_penalty grammar grammar_lazy grammar_triggers grammar_type id_slot ignore_eos
            input_extra input_prefix input_suffix json_schema logit_bias logprobs lora max_tokens
            min_keep min_p mirostat mirostat_eta mirostat_tau model n n_cache_reuse n_cmpl n_discard
            n_indent n_keep n_predict n_probs post_sampling_probs presence_penalty preserved_tokens
            prompt repeat_last_n repeat_penalty response_fields return_progress return_tokens
            samplers seed sse_ping_interval stop stream t_max_predict_ms t_max_prompt_ms temperature
            timings_per_token top_k top_n_sigma top_p typical_p verbose xtc_probability
            xtc_threshold
        """,
    },
    "ollama_chat": {
        "Ollama": """
            _debug_render_only format keep_alive logprobs messages model options shift stream think
            tools top_logprobs truncate
        """,
    },
    "ollama_generate": {
        "Ollama": """
            _debug_render_only context format height images keep_alive logprobs model options prompt
            raw shift steps stream suffix system template think top_logprobs truncate width
        """,
    },
    "ollama_embed": {
        "Ollama": "dimensions input keep_alive model options truncate",
    },
}

KNOWN: Mapping[Api, Mapping[str, frozenset[str]]] = {
    api: {server: frozenset(names.split()) for server, names in servers.items()}
    for api, servers in _TEXTS.items()
}
ALL = frozenset(name for servers in KNOWN.values() for names in servers.values() for name in names)
