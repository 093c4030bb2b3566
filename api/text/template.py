"""Messages in the form that chat templates expect: dictionaries with the fields they know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chairlift.api.schemas.messages import Message, ToolCall

TemplateMessage = dict[str, Any]
# A text, or where a message has images, its parts: ``{"type": "text"}`` and ``{"type": "image"}``.
TemplateContent = str | list[dict[str, str]]


class Rendering(NamedTuple):
    """The arguments of a chat template.

    Attributes:
        messages: the conversation.
        tools: the tools in OpenAI's format.
        opens: the prompt ends with the beginning of a reply.
        continues: the prompt ends with the last message, left open for the model to continue.
        kwargs: the template's settings.
    """

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]]
    opens: bool
    continues: bool
    kwargs: Mapping[str, Any]


def content_of(message: Message) -> TemplateContent:
    """A message's content for the template."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    start = 0
    for offset, _ in message.images:
        parts += _text_parts(message.content[start:offset])
        parts.append({"type": "image"})
        start = offset
    return parts + _text_parts(message.content[start:])


def joined(contents: Sequence[TemplateContent], separator: str = "") -> TemplateContent:
    """Several contents as one, with ``separator`` between them."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return separator.join(texts)
    parts: list[dict[str, str]] = []
    for number, content in enumerate(contents):
        parts += _text_parts(separator if number else "")
        parts += _text_parts(content) if isinstance(content, str) else content
    return parts


def _text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def template_message(message: Message, knows_developer: bool) -> TemplateMessage:
    """A message for templates that know calls, with each call's arguments as an object.

    Unless ``knows_developer``, a developer message becomes a system message.
    """
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    fields: TemplateMessage = {"role": role, "content": content_of(message)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if (thought := message.thought) is not None:
        fields["reasoning_content"] = fields["reasoning"] = thought
    return fields


def with_text_arguments(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The messages for a template that expects the arguments of calls as JSON text."""
    return [
        {**message, "tool_calls": [_text_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def with_text_parts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The messages for a template that expects a content to be a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def arguments_of(call: ToolCall) -> Any:
    """The arguments as an object, or as the original text if it is not a JSON object."""
    text = call.function.arguments
    try:
        arguments = json.loads(text or "{}")
        if "\\u" in text:  # half a character (a lone surrogate) has no UTF-8, and so no tokens
            json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _template_call(call: ToolCall) -> TemplateMessage:
    function = {"name": call.function.name, "arguments": arguments_of(call)}
    return {"id": call.id, "type": "function", "function": function}


def _text_call(call: TemplateMessage) -> TemplateMessage:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
