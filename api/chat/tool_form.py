"""The JSON form of calls: describes tools in the prompt for models without a native format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.api.schemas.messages import Message, ToolCall
from chairlift.api.text.chat_format import FORM_END, FORM_START
from chairlift.api.text.template import (
    TemplateMessage,
    arguments_of,
    content_of,
    joined,
    template_message,
)

_DESCRIPTION = """\
These functions can be called. Each is described in JSON, its parameters by a JSON schema:
{tools}

To call {count}, reply with {blocks} of this form and nothing after it:
{start}
{{"name": "the function's name", "arguments": {{"a parameter's name": "its value"}}}}
{end}

What a call returned comes in the next message, between <tool_response> and </tool_response>."""


def description(tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """The system message's text about the tools, which are in OpenAI's format."""
    return _DESCRIPTION.format(
        tools="\n".join(_dumped(tool["function"]) for tool in tools),
        count="one or several of them" if parallel else "one of them",
        blocks="a block for each call" if parallel else "a block",
        start=FORM_START,
        end=FORM_END,
    )


def as_text(
    messages: Sequence[Message], description: str | None, knows_developer: bool
) -> list[TemplateMessage]:
    """The conversation with calls and their results as text.

    ``description`` is added to the last of the leading system messages. If there is none, it
    becomes one.
    """
    runs: list[list[TemplateMessage]] = []
    after_result = False
    for message in messages:
        fields = _plain(message, knows_developer)
        # Results become user messages. Join them with a user message that follows, since many
        # templates require user and assistant to alternate.
        if after_result and fields["role"] == "user":
            runs[-1].append(fields)
        else:
            runs.append([fields])
            after_result = message.role == "tool"
    plain = [{**run[0], "content": joined([each["content"] for each in run], "\n")} for run in runs]
    if description is not None:
        _describe(plain, description)
    return plain


def _plain(message: Message, knows_developer: bool) -> TemplateMessage:
    if message.role == "tool":
        content = joined(["<tool_response>\n", content_of(message), "\n</tool_response>"])
        return {"role": "user", "content": content}
    fields = template_message(message, knows_developer)
    if fields.pop("tool_calls", None):
        calls = [_call(call) for call in message.tool_calls]
        fields["content"] = "\n".join([message.content, *calls] if message.content else calls)
    return fields


def _describe(messages: list[TemplateMessage], description: str) -> None:
    first_other = next(
        (i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")),
        len(messages),
    )
    if first_other == 0:
        messages.insert(0, {"role": "system", "content": description})
    else:
        messages[first_other - 1]["content"] += "\n\n" + description


def _call(call: ToolCall) -> str:
    text = _dumped({"name": call.function.name, "arguments": arguments_of(call)})
    return f"{FORM_START}\n{text}\n{FORM_END}"


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
