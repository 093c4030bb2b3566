"""Converts Anthropic's turns to the messages of a chat request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from chairlift.api.anthropic.blocks import (
    DocumentBlockInput,
    ImageBlockInput,
    TextBlockInput,
    ThinkingBlockInput,
    ToolResultBlockInput,
    ToolUseBlockInput,
    content_of,
    joined,
    text_of,
)
from chairlift.api.anthropic.request import Turn

MessageFields = dict[str, Any]


def messages_of(system: Sequence[TextBlockInput], turns: Sequence[Turn]) -> list[MessageFields]:
    """The messages of the conversation.

    Like Anthropic's server, it merges consecutive turns of one role. Each tool result becomes a
    separate message.
    """
    parts: list[MessageFields] = []
    if system:
        parts.append({"role": "system", "content": text_of(system)})
    for turn in turns:
        is_assistant = turn.role == "assistant"
        parts += _assistant_messages(turn) if is_assistant else _other_messages(turn)
    return [_joined(run) for run in _runs(parts)]


def _other_messages(turn: Turn) -> list[MessageFields]:
    parts: list[MessageFields] = []
    shown = (TextBlockInput, ImageBlockInput, DocumentBlockInput)
    for is_shown, blocks in groupby(turn.content, lambda block: isinstance(block, shown)):
        if is_shown:
            own = [block for block in blocks if isinstance(block, shown)]
            parts.append({"role": turn.role, "content": content_of(own)})
        else:
            parts += [_result(block) for block in blocks if isinstance(block, ToolResultBlockInput)]
    return parts


def _result(block: ToolResultBlockInput) -> MessageFields:
    content = content_of(block.content)
    # Templates have no field that marks a failed call.
    if block.is_error:
        content = (
            f"Error: {content}" if isinstance(content, str) else joined(["Error:", content], " ")
        )
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant_messages(turn: Turn) -> list[MessageFields]:
    message: MessageFields = {"role": "assistant"}
    texts = [block.text for block in turn.content if isinstance(block, TextBlockInput)]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlockInput)]
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    for block in turn.content:
        match block:
            case ToolUseBlockInput():
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return [message]


def _runs(parts: Sequence[MessageFields]) -> Iterator[list[MessageFields]]:
    """Groups consecutive messages of one role; each tool result is a separate group."""
    for role, run in groupby(parts, lambda part: part["role"]):
        if role == "tool":
            yield from ([part] for part in run)
        else:
            yield list(run)


def _joined(run: Sequence[MessageFields]) -> MessageFields:
    """Merges messages of one role into one."""
    message = dict(run[0])
    for name in ("content", "reasoning_content"):
        contents = [part[name] for part in run if name in part]
        if contents:
            message[name] = joined(contents, "\n\n") if len(contents) > 1 else contents[0]
    if calls := [call for part in run for call in part.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message
