"""Requests with each field of OpenAI's Responses API, and the expected outcome of each."""

from __future__ import annotations

from typing import Any

from support.api.fields import done, ignored, refused
from support.api.fields_of_response_items import ITEM_FIELDS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": SCHEMA}
OTHER: dict[str, Any] = {"type": "function", "name": "g", "parameters": SCHEMA}
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "name": "f"}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


def _tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, **fields}]}


FIELDS = [
    done("background", {"background": True}),
    refused("background", "background", {"background": True, "store": False}),
    ignored("background", {"background": False}),
    refused("context_management", "context_management", {"context_management": [{"type": "x"}]}),
    refused("conversation", "conversation", {"conversation": "conv_1"}),
    refused("conversation", "conversation", {"conversation": {"id": "conv_1"}}),
    done("include", {"include": ["message.output_text.logprobs"]}),
    done("input", {"input": "Other"}),
    done("instructions", {"instructions": "Be brief"}),
    done("max_output_tokens", {"max_output_tokens": 7}),
    ignored("max_tool_calls", {"max_tool_calls": 1}),
    done("metadata", {"metadata": {"a": "b"}}),
    refused("model", "gpt-5", {"model": "gpt-5"}),
    done("model", {"model": "org/tiny"}),
    refused("moderation", "moderation", {"moderation": {"model": "m"}}),
    done("parallel_tool_calls", {"parallel_tool_calls": False}, tools=[TOOL]),
    refused(
        "previous_response_id",
        "Previous response with id 'resp_1' not found.",
        {"previous_response_id": "resp_1"},
    ),
    refused("prompt", "prompt", {"prompt": {"id": "pmpt_1"}}),
    ignored("prompt_cache_key", {"prompt_cache_key": "k"}),
    ignored("prompt_cache_options", {"prompt_cache_options": {"mode": "explicit"}}),
    ignored("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    done("reasoning", {"reasoning": {"effort": "none"}}),
    done("reasoning.effort", {"reasoning": {"effort": "none"}}),
    ignored("reasoning.summary", {"reasoning": {"summary": "auto"}}),
    ignored("reasoning.generate_summary", {"reasoning": {"generate_summary": "concise"}}),
    refused("reasoning.context", "reasoning.context", {"reasoning": {"context": "all_turns"}}),
    ignored("reasoning.context", {"reasoning": {"context": "auto"}}),
    refused("reasoning.mode", "reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ignored("reasoning.mode", {"reasoning": {"mode": "standard"}}),
    ignored("safety_identifier", {"safety_identifier": "s"}),
    *(ignored("service_tier", {"service_tier": tier}) for tier in ("auto", "flex", "priority")),
    done("store", {"store": False}),
    done("stream", {"stream": True}),
    ignored("stream_options", {"stream_options": {"include_obfuscation": True}}, stream=True),
    ignored(
        "stream_options.include_obfuscation",
        {"stream_options": {"include_obfuscation": True}},
        stream=True,
    ),
    done("temperature", {"temperature": 0.5}),
    done("text", {"text": {"format": FORMAT}}),
    done("text.format", {"text": {"format": FORMAT}}),
    refused("text.verbosity", "text.verbosity", {"text": {"verbosity": "low"}}),
    ignored("text.verbosity", {"text": {"verbosity": "medium"}}),
    done("tool_choice", {"tool_choice": "required"}, tools=[TOOL]),
    done("tools", {"tools": [TOOL]}),
    done("top_logprobs", {"top_logprobs": 2}),
    done("top_p", {"top_p": 0.5}),
    *(ignored("truncation", {"truncation": value}) for value in ("auto", "disabled")),
    done("user", {"user": "u"}),
    # Tools by their types; a required call of an unsupported one is refused.
    done("tools: function", {"tools": [TOOL]}),
    *(
        ignored(f"tools: {kind}", {"tools": [{"type": kind, **more}, TOOL]}, tools=[TOOL])
        for kind, more in (
            ("apply_patch", {}),
            ("code_interpreter", {"container": {"type": "auto"}}),
            ("computer", {}),
            (
                "computer_use_preview",
                {"display_height": 9, "display_width": 9, "environment": "linux"},
            ),
            ("custom", {"name": "c", "format": {"type": "grammar", "syntax": "lark"}}),
            ("file_search", {"vector_store_ids": ["v"]}),
            ("image_generation", {"background": "opaque", "model": "gpt-image-1"}),
            ("local_shell", {}),
            ("mcp", {"server_label": "m", "server_url": "http://x"}),
            ("namespace", {"name": "n", "description": "", "tools": [TOOL]}),
            ("programmatic_tool_calling", {}),
            ("shell", {"environment": {"type": "local"}}),
            ("tool_search", {"execution": "client"}),
            ("web_search", {"external_web_access": False}),
            ("web_search_2025_08_26", {}),
            ("web_search_preview", {}),
            ("web_search_preview_2025_03_11", {}),
        )
    ),
    refused("tools", "web_search", {"tools": [{"type": "web_search"}]}, tool_choice="required"),
    ignored("tools.function.allowed_callers", _tool(allowed_callers=["direct"]), tools=[TOOL]),
    refused(
        "tools.function.allowed_callers",
        "tools[0].allowed_callers",
        _tool(allowed_callers=["programmatic"]),
    ),
    ignored("tools.function.defer_loading", _tool(defer_loading=True), tools=[TOOL]),
    ignored("tools.function.output_schema", _tool(output_schema=SCHEMA), tools=[TOOL]),
    done("tools.function.description", _tool(description="It is f"), tools=[TOOL]),
    done("tools.function.name", _tool(name="h"), tools=[TOOL]),
    done("tools.function.parameters", _tool(parameters={"type": "object"}), tools=[TOOL]),
    done("tools.function.strict", _tool(strict=True), tools=[TOOL]),
    done("tools.function.type", {"tools": [TOOL]}),
    # Tool choices.
    done("tool_choice: function", {"tool_choice": FUNCTION}, tools=[TOOL]),
    done(
        "tool_choice: allowed_tools",
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}},
        tools=[TOOL, OTHER],
    ),
    refused(
        "tool_choice: allowed_tools",
        "mcp",
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "mcp", "server_label": "m"}],
            }
        },
        tools=[TOOL],
    ),
    refused(
        "tool_choice: allowed_tools",
        "'h'",
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "h"}],
            }
        },
        tools=[TOOL],
    ),
    *(
        refused(
            f"tool_choice: {kind}",
            kind,
            {"tool_choice": {"type": kind, **more}},
            tools=[{"type": kind, **more}, TOOL],
        )
        for kind, more in (
            ("apply_patch", {}),
            ("code_interpreter", {}),
            ("computer", {}),
            ("computer_use", {}),
            ("computer_use_preview", {}),
            ("custom", {"name": "c"}),
            ("file_search", {}),
            ("image_generation", {}),
            ("mcp", {"server_label": "m", "name": "x"}),
            ("programmatic_tool_calling", {}),
            ("shell", {}),
            ("web_search_preview", {}),
            ("web_search_preview_2025_03_11", {}),
        )
    ),
    *ITEM_FIELDS,
]

# The fields of /v1/responses/input_tokens.
INPUT_TOKENS_FIELDS = [
    refused("conversation", "conversation", {"conversation": "conv_1"}),
    done("input", {"input": "A longer one"}),
    done("instructions", {"instructions": "Be brief"}),
    refused("model", "gpt-5", {"model": "gpt-5"}),
    ignored("parallel_tool_calls", {"parallel_tool_calls": False}, tools=[TOOL]),
    refused("personality", "personality", {"personality": "friendly"}),
    refused("previous_response_id", "resp_1", {"previous_response_id": "resp_1"}),
    done("reasoning", {"reasoning": {"effort": "none"}}),
    ignored("text", {"text": {"format": FORMAT}}),
    refused("text", "text.verbosity", {"text": {"verbosity": "low"}}),
    done("tool_choice", {"tool_choice": "none"}, tools=[TOOL]),
    refused("tool_choice", "mcp", {"tool_choice": {"type": "mcp"}}, tools=[TOOL]),
    done("tools", {"tools": [TOOL]}),
    ignored("tools", {"tools": [{"type": "web_search"}]}),
    ignored("truncation", {"truncation": "auto"}),
]
