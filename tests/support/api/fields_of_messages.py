"""Requests with each field of Anthropic's Messages API, and the expected outcome of each."""

from __future__ import annotations

from typing import Any

from support.api.fields import done, ignored, refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Hi"}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CACHED = {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "Hi"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
ASKED = [USER, {"role": "assistant", "content": [USE]}]
PLAIN = {"type": "text", "media_type": "text/plain", "data": "A text"}
DOCUMENT: dict[str, Any] = {"type": "document", "source": PLAIN}


def _block(**block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def _thinking(**fields: Any) -> dict[str, Any]:
    return {"thinking": {"type": "adaptive", **fields}}


def _tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, **fields}]}


def _edit(**edit: Any) -> dict[str, Any]:
    return {"context_management": {"edits": [edit]}}


CLEAR = "clear_thinking_20251015"

FIELDS = [
    ignored("billing_policy", {"billing_policy": {"type": "billing_policy", "bill_to": "self"}}),
    ignored("cache_control", {"cache_control": CACHED}),
    refused("compaction", "compaction", {"compaction": {"type": "summarize"}}),
    refused("container", "container", {"container": "c"}),
    ignored("context_management", _edit(type=CLEAR, keep="all")),
    ignored("context_management", _edit(type=CLEAR, keep={"type": "all"})),
    ignored("context_management", {"context_management": {"edits": []}}),
    refused("context_management: " + CLEAR, CLEAR, _edit(type=CLEAR)),
    *(
        refused(f"context_management: {kind}", kind, _edit(type=kind))
        for kind in ("clear_tool_uses_20250919", "compact_20260112")
    ),
    ignored("diagnostics", {"diagnostics": {"previous_message_id": "msg_1"}}),
    ignored("fallback_credit_token", {"fallback_credit_token": "t"}),
    ignored("fallbacks", {"fallbacks": [{"model": "m"}]}),
    ignored("inference_geo", {"inference_geo": "eu"}),
    done("max_tokens", {"max_tokens": 7}),
    refused("mcp_servers", "mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    ignored("mcp_servers", {"mcp_servers": []}),
    done("messages", {"messages": [{"role": "user", "content": "Other"}]}),
    ignored("metadata", {"metadata": {"user_id": "u"}}),
    done("model", {"model": "org/tiny"}),
    refused("model", "claude", {"model": "claude"}),
    done("output_config", {"output_config": {"format": FORMAT}}),
    done("output_config.format", {"output_config": {"format": FORMAT}}),
    done("output_config.effort", {"output_config": {"effort": "low"}}),
    refused(
        "output_config.task_budget",
        "output_config.task_budget",
        {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
    ),
    done("output_format", {"output_format": FORMAT}),
    ignored("output_format", {"output_format": FORMAT}, output_config={"format": FORMAT}),
    refused(
        "output_format",
        "output_format",
        {"output_format": {"type": "json_schema", "schema": {"type": "string"}}},
        output_config={"format": FORMAT},
    ),
    refused("output_format", "output_format", {"output_format": {"type": "xml"}}),
    refused("service_tier", "service_tier", {"service_tier": "batch"}),
    ignored("service_tier", {"service_tier": "standard_only"}),
    refused("speed", "speed", {"speed": "fast"}),
    ignored("speed", {"speed": "standard"}),
    done("stop_sequences", {"stop_sequences": ["l"]}),
    done("stream", {"stream": True}),
    done("system", {"system": "Be brief"}),
    done("system", {"system": [{**TEXT, "cache_control": CACHED}]}),
    done("temperature", {"temperature": 0.5}),
    done("thinking", {"thinking": {"type": "disabled"}}),
    refused("thread", "thread", {"thread": {"type": "create"}}),
    done("tool_choice", {"tool_choice": {"type": "any"}}, tools=[TOOL]),
    done("tools", {"tools": [TOOL]}),
    done("top_k", {"top_k": 5}),
    done("top_p", {"top_p": 0.5}),
    ignored("user_profile_id", {"user_profile_id": "u"}),
    ignored("workspace_id", {"workspace_id": "w"}),
    # Thinking.
    done("thinking: enabled", {"thinking": {"type": "enabled", "budget_tokens": 50}}),
    done("thinking: disabled", {"thinking": {"type": "disabled"}}),
    done("thinking: adaptive", {"thinking": {"type": "adaptive"}}, thinking={"type": "disabled"}),
    refused("thinking: between_tools", "between_tools", {"thinking": {"type": "between_tools"}}),
    ignored("thinking.display", _thinking(display="summarized"), **_thinking()),
    done("thinking.display", _thinking(display="omitted"), **_thinking()),
    refused("thinking.display", "display", _thinking(display="updates")),
    ignored(
        "thinking.block_binding",
        _thinking(block_binding={"prefix_mismatch_behavior": "error"}),
        **_thinking(),
    ),
    # Tools.
    done("tools: custom", {"tools": [{"type": "custom", **TOOL}]}),
    *(
        refused(f"tools: {kind}", kind, {"tools": [{"type": kind, "name": "x"}, TOOL]})
        for kind in (
            "advisor_20260301",
            "bash_20241022",
            "bash_20250124",
            "browser_toolset_20260801",
            "code_execution_20250522",
            "code_execution_20250825",
            "code_execution_20260120",
            "code_execution_20260521",
            "computer_20241022",
            "computer_20250124",
            "computer_20251124",
            "computer_toolset_20260801",
            "mcp_toolset",
            "memory_20250818",
            "text_editor_20241022",
            "text_editor_20250124",
            "text_editor_20250429",
            "text_editor_20250728",
            "tool_search_tool_bm25",
            "tool_search_tool_bm25_20251119",
            "tool_search_tool_regex",
            "tool_search_tool_regex_20251119",
            "web_fetch_20250910",
            "web_fetch_20260209",
            "web_fetch_20260309",
            "web_fetch_20260318",
            "web_search_20250305",
            "web_search_20260209",
            "web_search_20260318",
        )
    ),
    done("tools.name", _tool(name="g"), tools=[TOOL]),
    done("tools.description", _tool(description="It is f"), tools=[TOOL]),
    done("tools.input_schema", _tool(input_schema={"type": "object"}), tools=[TOOL]),
    done("tools.strict", _tool(strict=True), tools=[TOOL]),
    ignored("tools.type", _tool(type="custom"), tools=[TOOL]),
    ignored("tools.allowed_callers", _tool(allowed_callers=["direct"]), tools=[TOOL]),
    refused(
        "tools.allowed_callers",
        "allowed_callers",
        _tool(allowed_callers=["code_execution_20250825"]),
    ),
    ignored("tools.cache_control", _tool(cache_control=CACHED), tools=[TOOL]),
    ignored("tools.defer_loading", _tool(defer_loading=True), tools=[TOOL]),
    ignored("tools.eager_input_streaming", _tool(eager_input_streaming=True), tools=[TOOL]),
    refused("tools.input_examples", "tools[0].input_examples", _tool(input_examples=[{"a": 1}])),
    ignored("tools.input_examples", _tool(input_examples=[]), tools=[TOOL]),
    # Tool choices.
    ignored("tool_choice: auto", {"tool_choice": {"type": "auto"}}, tools=[TOOL]),
    done(
        "tool_choice: auto",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        tools=[{**TOOL, "name": "get_weather"}],
    ),
    done("tool_choice: any", {"tool_choice": {"type": "any"}}, tools=[TOOL]),
    done("tool_choice: tool", {"tool_choice": {"type": "tool", "name": "f"}}, tools=[TOOL]),
    refused(
        "tool_choice: tool", "'g'", {"tool_choice": {"type": "tool", "name": "g"}}, tools=[TOOL]
    ),
    done("tool_choice: none", {"tool_choice": {"type": "none"}}, tools=[TOOL]),
    # Blocks of a message's content.
    done("content: text", _block(type="text", text="More")),
    ignored("content.text.cache_control", _block(**TEXT, cache_control=CACHED)),
    ignored("content.text.citations", _block(**TEXT, citations=[{"type": "char_location"}])),
    done(
        "content: thinking",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "s"},
                        {**USE, "caller": {"type": "direct"}},
                    ],
                },
                {"role": "user", "content": [RESULT]},
            ]
        },
        messages=[*ASKED, {"role": "user", "content": [RESULT]}],
    ),
    done("content: tool_use", {"messages": [*ASKED, USER]}, messages=[USER, USER]),
    done(
        "content: tool_result",
        {"messages": [*ASKED, {"role": "user", "content": [RESULT]}]},
    ),
    done(
        "content: tool_result",
        {"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "is_error": True}]}]},
        messages=[*ASKED, {"role": "user", "content": [RESULT]}],
    ),
    *(
        refused(
            f"content.tool_result: {kind}",
            kind,
            {
                "messages": [
                    *ASKED,
                    {"role": "user", "content": [{**RESULT, "content": [{"type": kind}]}]},
                ]
            },
        )
        for kind in ("browser_state", "search_result", "tool_reference")
    ),
    done(
        "content.tool_result: document",
        {"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "content": [DOCUMENT]}]}]},
        messages=[*ASKED, {"role": "user", "content": [{**RESULT, "content": []}]}],
    ),
    done("content: document", _block(**DOCUMENT)),
    done("content.document.title", _block(**DOCUMENT, title="T"), **_block(**DOCUMENT)),
    done("content.document.context", _block(**DOCUMENT, context="C"), **_block(**DOCUMENT)),
    *(
        ignored(
            f"content.document.{field}", _block(**DOCUMENT, **{field: value}), **_block(**DOCUMENT)
        )
        for field, value in (("citations", {"enabled": True}), ("cache_control", CACHED))
    ),
    done("content.document.source: text", _block(**DOCUMENT)),
    done(
        "content.document.source: content",
        _block(type="document", source={"type": "content", "content": [{**TEXT, "text": "More"}]}),
    ),
    *(
        refused(
            f"content.document.source: {source['type']}",
            "send their text",
            _block(type="document", source=source),
        )
        for source in (
            {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            {"type": "url", "url": "https://example.org/a.pdf"},
            {"type": "file", "file_id": "f"},
        )
    ),
    ignored(
        "content: redacted_thinking",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "EmwK"}, USE],
                },
                USER,
            ]
        },
        messages=[*ASKED, USER],
    ),
    refused(
        "content.tool_result: image",
        "image",
        {"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
    ),
    refused("content: image", "image", _block(**IMAGE)),
    *(
        refused(f"content: {kind}", kind, _block(type=kind))
        for kind in (
            "advisor_tool_result",
            "bash_code_execution_tool_result",
            "code_execution_tool_result",
            "compaction",
            "container_upload",
            "fallback",
            "mcp_tool_listing",
            "mcp_tool_result",
            "mcp_tool_use",
            "search_result",
            "server_tool_use",
            "text_editor_code_execution_tool_result",
            "tool_addition",
            "tool_removal",
            "tool_search_tool_result",
            "web_fetch_tool_result",
            "web_search_tool_result",
        )
    ),
    # Turns.
    done("messages.role", {"messages": [{"role": "system", "content": "Hi"}, USER]}),
    ignored(
        "messages.clear_at",
        {"messages": [{"role": "system", "content": "Hi", "clear_at": "never"}, USER]},
        messages=[{"role": "system", "content": "Hi"}, USER],
    ),
    refused(
        "messages.clear_at",
        "clear_at",
        {
            "messages": [
                {"role": "system", "content": "Hi", "clear_at": "next_user_message"},
                USER,
            ]
        },
    ),
    refused(
        "messages.output_config",
        "output_config",
        {"messages": [{"role": "system", "content": "Hi", "output_config": {"effort": "low"}}]},
    ),
]

# The fields of /v1/messages/count_tokens.
COUNT_TOKENS_FIELDS = [
    ignored("compaction", {"compaction": {"type": "summarize"}}),
    done("tools", {"tools": [TOOL]}),
    done("system", {"system": "Be brief"}),
    done("messages", {"messages": [{"role": "user", "content": "Longer"}]}),
    done("thinking", {"thinking": {"type": "disabled"}}),
    done("tool_choice", {"tool_choice": {"type": "none"}}, tools=[TOOL]),
    ignored("cache_control", {"cache_control": CACHED}),
    ignored("output_config", {"output_config": {"format": FORMAT}}),
    ignored("context_management", _edit(type=CLEAR, keep="all")),
    refused("mcp_servers", "mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    refused("speed", "speed", {"speed": "fast"}),
    refused("model", "claude", {"model": "claude"}),
]
