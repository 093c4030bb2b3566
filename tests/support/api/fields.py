"""Requests for tests of their fields: a body for each route, and what becomes of single fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from support.api.api_server import tool

Outcome = Literal["done", "ignored", "refused"]


@dataclass(frozen=True)
class FieldCase:
    """A field in a request, and its outcome.

    Attributes:
        name: the field, or a kind of object in it ("tools: web_search"), as the docs name it.
        outcome: "done" changes the prompt, the sampling or the reply; "ignored" changes nothing;
            "refused" is an error reply.
        body: the part of the request that contains the field.
        context: other fields that the request needs.
        message: a part of the error's message or param, if the field is refused.
    """

    name: str
    outcome: Outcome
    body: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}"


def done(name: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "done", body, context)


def ignored(name: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "ignored", body, context)


def refused(name: str, message: str, body: dict[str, Any], **context: Any) -> FieldCase:
    return FieldCase(name, "refused", body, context, message)


SCHEMA = {
    "type": "object",
    "description": "d",
    "properties": {"a": {"type": "string", "pattern": "a+", "enum": ["b"], "default": "c"}},
    "required": ["a"],
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "name": "u", "content": [{"type": "text", "text": "t"}]},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
]
SHARED = {"model": "org/tiny", "user": "u", "stop": ["s", "t"], "cache_salt": "c", "unknown": "x"}
# A valid body for each route that takes JSON, with most of its fields that hold text.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SHARED,
        "messages": MESSAGES,
        "metadata": {"k": "v"},
        "tools": [tool("f", SCHEMA)],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": FORMAT,
        "prediction": {"type": "content", "content": "p"},
        "guided_regex": "a+",
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"k": "v"},
        "reasoning_effort": "low",
    },
    "/v1/completions": {**SHARED, "prompt": ["p", "q"], "suffix": "s", "guided_choice": ["a"]},
    "/v1/responses": {
        **SHARED,
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "metadata": {"k": "v"},
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "previous_response_id": "resp_1",
    },
    "/v1/responses/input_tokens": {"input": "i", "instructions": "i"},
    "/v1/responses/compact": {"input": "i", "instructions": "i"},
    "/v1/messages": {
        **SHARED,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}],
            },
        ],
        "stop_sequences": ["s"],
        "metadata": {"user_id": "u"},
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "c"}], "system": "s"},
    "/api/chat": {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": "c", "images": ["x"]}],
        "tools": [tool("f", SCHEMA)],
        "format": SCHEMA,
        "options": {"stop": ["s"]},
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "org/tiny", "prompt": "p", "system": "s", "suffix": "x"},
    "/api/embed": {"model": "org/tiny", "input": ["a", "b"]},
    "/api/embeddings": {"model": "org/tiny", "prompt": "p"},
    "/api/show": {"model": "org/tiny"},
    "/v1/embeddings": {**SHARED, "input": ["a", "b"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "t"}]},
    "/apply-template": {"messages": MESSAGES[:2]},
    "/tokenize": {"prompt": "p"},
    "/detokenize": {"tokens": [5]},
    "/v1/batches": {"input_file_id": "f", "endpoint": "/v1/completions", "metadata": {"k": "v"}},
    "/v1/load_lora_adapter": {"lora_name": "n", "lora_path": "p"},
    "/v1/unload_lora_adapter": {"lora_name": "n"},
}
