"""Request fields that are known and not supported: refused by name, never silently dropped."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from chairlift.engine.errors import RequestError

logger = logging.getLogger(__name__)

# What a client has misspelt is told in the log; what else stands for a name may be a user's text.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
OTHER = "(no identifiers)"

# Each field with the values that ask for nothing (null always does). Names from OpenAI's API,
# Anthropic's, vLLM's extensions to them and mlx_lm.server's. Some are fields of one endpoint only:
# it declares them, so that they do not come here, and the others refuse them.
REFUSED: Mapping[str, tuple[object, ...]] = {
    # tools
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "tool_calls": ([],),
    # what the reply looks like
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (False,),
    # how tokens are chosen
    "best_of": (1,),
    "max_completion_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "xtc_probability": (0, 0.0),
    "logit_processors": ([],),
    "draft_model": (),
    "num_draft_tokens": (),
    "adapters": (),
    # how the prompt is made
    "messages": ([],),
    "prompt": (),
    "system": ([], ""),
    "instructions": ("",),
    "previous_response_id": (),
    "suffix": ("",),
    "echo": (False,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    # how the request is handled
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "background": (False,),
    "conversation": (),
    "truncation": ("disabled",),
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "priority": (0,),
    "kv_transfer_params": ({},),
}

# Likewise, where something is generated: elsewhere they change nothing.
REFUSED_OF_REPLIES: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "max_tokens": (),
    "max_output_tokens": (),
    "stop": ([],),
    "stop_sequences": ([],),
    "seed": (),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

# These change nothing in the reply, whatever they say. ``annotations``, ``citations`` and
# ``refusal`` are parts of assistant messages that clients send back.
HARMLESS = frozenset(
    {"annotations", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"}
    | {"refusal", "safety_identifier", "user", "prompt_cache_options", "max_tool_calls"}
    | {"cache_control", "citations", "inference_geo"}
)


def check_extra_fields(parts: Iterable[Mapping[str, object]], generates: bool) -> None:
    """Refuses the fields that would be wrong to drop; logs the unknown ones in one line.

    ``parts`` are the undeclared fields of a request and of the objects in it. ``generates``: the
    reply to it is generated.

    Raises:
        RequestError: a known field asks for something that is not supported.
    """
    refused = {**REFUSED, **REFUSED_OF_REPLIES} if generates else REFUSED
    unknown: dict[str, None] = {}
    for part in parts:
        for name, value in part.items():
            if name in HARMLESS:
                continue
            if name not in refused:
                unknown[name if _IDENTIFIER.fullmatch(name) else OTHER] = None
            elif not _asks_for_nothing(value, refused[name]):
                raise RequestError(f"{name} is not supported", name)
    if unknown:
        logger.warning("ignored unknown request fields: %s", ", ".join(list(unknown)[:20]))


def _asks_for_nothing(value: object, nothings: tuple[object, ...]) -> bool:
    # By type too: False must not pass where 0 is accepted.
    return any(type(value) is type(nothing) and value == nothing for nothing in nothings)
