"""Checks fields that a request's model does not declare, so that none is silently dropped.

A field in ``known_fields``, whichever server or API it comes from, is ignored if it is in
``harmless_fields``, and otherwise refused here unless its value is neutral. Fields in no list are
ignored and logged. Fields that a model declares only to ignore or refuse them have the types in
``field_types``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Set
from functools import cache

from chairlift.api.schemas.field_types import is_one_of
from chairlift.api.schemas.harmless_fields import HARMLESS
from chairlift.api.schemas.known_fields import ALL, KNOWN
from chairlift.api.schemas.request import Request
from chairlift.engine.errors import RequestError

logger = logging.getLogger(__name__)

# Log only identifiers, which may be misspelt fields; other keys may be a user's text.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
OTHER = "(no identifiers)"

_OFF = """
    _debug_render_only add_special_tokens background continue_final_message disable_any_whitespace
    echo enable_response_messages grammar_lazy ignore_eos include_stop_str_in_output logprobs
    no_stop_trim post_sampling_probs prefix prompt_logprobs raw reasoning_control
    return_cached_tokens_details return_flat_raw_output_top_logprobs return_hidden_states
    return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext
    return_progress return_prompt_text return_prompt_token_ids return_routed_experts
    return_sampling_mask return_spec_tokens_details return_token_ids return_token_offsets
    return_tokens return_tokens_as_token_ids return_weight_versions shift store stream
    timings_per_token truncate use_audio_in_video use_beam_search verbose watermarking
"""
_ON = """
    add_generation_prompt include_reasoning parse_tool_calls separate_reasoning skip_special_tokens
    stream_reasoning use_activation
"""
_ZERO = """
    dry_multiplier dynatemp_range frequency_penalty min_keep min_p min_tokens mirostat n_indent
    n_probs presence_penalty priority top_k top_logprobs xtc_probability
"""
_ONE = (
    "best_of length_penalty n n_cmpl repeat_penalty repetition_penalty temperature top_p typical_p"
)
_MINUS_ONE = """
    adaptive_target n_predict reasoning_budget_tokens t_max_predict_ms t_max_prompt_ms
    thinking_budget_tokens top_k top_n_sigma
"""
_EMPTY_LIST = """
    allowed_callers bad_words documents fallbacks functions grammar_triggers images include lora
    logits_processors mcp_servers messages preserved_tokens response_fields stop stop_sequences
    stop_token_ids system tool_calls tools
"""
_EMPTY_OBJECT = """
    chat_template_kwargs custom_params ec_transfer_params images_config kv_transfer_params
    logit_bias media_io_kwargs mm_processor_kwargs options session_params video_config vllm_xargs
"""
_EMPTY_TEXT = "grammar instructions reasoning_budget_message suffix system template"

# Further neutral values of single fields.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "encoding_format": ("float",),
    "embed_dtype": ("float32",),
    "embd_normalize": (2,),
    "endianness": ("native", "little"),
    "function_call": ("none",),
    "mm_payload": ("tensors",),
    "modalities": (["text"],),
    "padding": ("do_not_pad",),
    "reasoning_format": ("auto", "deepseek"),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "tool_choice": ("none",),
    "truncation": ("disabled",),
    "truncation_side": ("right",),
    "verbosity": ("medium",),
}
_GROUPS: tuple[tuple[str, tuple[object, ...]], ...] = (
    (_OFF, (False,)),
    (_ON, (True,)),
    (_ZERO, (0, 0.0)),
    (_ONE, (1, 1.0)),
    (_MINUS_ONE, (-1, -1.0)),
    (_EMPTY_LIST, ([],)),
    (_EMPTY_OBJECT, ({},)),
    (_EMPTY_TEXT, ("",)),
)


def neutral(name: str) -> tuple[object, ...]:
    """A field's neutral values besides null. Types count: False is not 0."""
    grouped = (values for names, values in _GROUPS if name in names.split())
    return (*_NEUTRAL.get(name, ()), *(value for values in grouped for value in values))


# The field of this server with the same effect; errors suggest it if the request declares it.
INSTEAD: Mapping[str, str] = {
    "embd_normalize": "normalize",
    "extra_key": "cache_salt",
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "reasoning": "reasoning_effort",
    "reasoning_budget_tokens": "thinking_token_budget",
    "repeat_penalty": "repetition_penalty",
    "think": "reasoning_effort",
    "thinking": "reasoning_effort",
    "thinking_budget_tokens": "thinking_token_budget",
    "use_activation": "normalize",
}

# Fields that change a prompt: refused even in requests that generate nothing.
_PROMPT_FIELDS = """
    adapters add_generation_prompt add_special_tokens audio chat_template chat_template_kwargs
    content context continue_final_message conversation documents functions generation_prompt
    images input input_ids instructions lora lora_path media_io_kwargs messages
    mm_processor_kwargs previous_input_messages previous_response_id prompt prompt_embeds
    reasoning_effort role_mapping suffix system template tool_choice tools truncate_prompt_tokens
    truncation_side
"""
# Fields refused in objects within a request: messages, tools, formats.
_IN_PARTS = """
    audio disable_any_whitespace function_call images prefix structural_tag structures system
    tool_calls tool_choice tools triggers verbosity videos whitespace_pattern
"""


def check_extra_fields(request: Request, generates: bool) -> None:
    """Refuses unsupported fields that are not neutral; logs unknown ones in one line.

    ``generates``: the request generates text.

    Raises:
        RequestError: a known field asks for something that is not supported.
    """
    top_level, *parts = request.take_extra()
    unknown = _check(top_level, refusable(generates), ALL, type(request))
    in_parts = frozenset(_IN_PARTS.split())
    for part in parts:
        unknown |= _check(part, in_parts, in_parts, type(request))
    if unknown:
        logger.warning("ignored unknown request fields: %s", ", ".join(list(unknown)[:20]))


@cache
def refusable(generates: bool) -> frozenset[str]:
    """The known fields that are refused in a request unless its model declares them."""
    if generates:
        return ALL - HARMLESS.keys()
    of_embeddings = frozenset(name for names in KNOWN["embeddings"].values() for name in names)
    return (of_embeddings | set(_PROMPT_FIELDS.split())) - HARMLESS.keys()


def _check(
    fields: Mapping[str, object], refused: Set[str], known: Set[str], kind: type[Request]
) -> dict[str, None]:
    """The names of the unknown fields, in order."""
    unknown: dict[str, None] = {}
    for name, value in fields.items():
        if name in refused:
            if not is_one_of(value, neutral(name)):
                instead = INSTEAD.get(name)
                hint = f"; {instead} is" if instead in kind.model_fields else ""
                raise RequestError(f"{name} is not supported{hint}", name)
        elif name not in HARMLESS and name not in known:
            unknown[name if _IDENTIFIER.fullmatch(name) else OTHER] = None
    return unknown
