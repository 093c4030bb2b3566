"""A conversation as chat templates take it: dictionaries of the fields they know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chairlift.api.schemas.messages import Message, ToolCall

Shown = dict[str, Any]


class Rendering(NamedTuple):
    """What a template is given.

    ``opens``: the prompt ends with the beginning of a reply; ``continues``: it ends with the last
    message, left open. ``kwargs`` are further settings of the template.
    """

    messages: Sequence[Shown]
    tools: Sequence[Mapping[str, Any]]
    opens: bool
    continues: bool
    kwargs: Mapping[str, Any]


def shown(message: Message, knows_developer: bool) -> Shown:
    """A message as templates take it that know calls; their arguments are objects.

    ``knows_developer``: the template has a role of that name; else it is a system message.
    """
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    fields: Shown = {"role": role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_shown_call(call) for call in message.tool_calls]
    if (thought := message.thought) is not None:
        fields["reasoning_content"] = fields["reasoning"] = thought
    return fields


def with_text_arguments(messages: Sequence[Shown]) -> list[Shown]:
    """The same messages for a template that wants the arguments of calls as JSON texts."""
    return [
        {**message, "tool_calls": [_text_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def arguments_of(call: ToolCall) -> Any:
    """The arguments as an object; what is none is left as the text that it is."""
    text = call.function.arguments
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _shown_call(call: ToolCall) -> Shown:
    function = {"name": call.function.name, "arguments": arguments_of(call)}
    return {"id": call.id, "type": "function", "function": function}


def _text_call(call: Shown) -> Shown:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
