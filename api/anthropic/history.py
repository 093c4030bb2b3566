"""From Anthropic's turns to the messages of a conversation, as chat requests have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from chairlift.api.anthropic.blocks import (
    TextBlockInput,
    ThinkingBlockInput,
    ToolResultBlockInput,
    ToolUseBlockInput,
    text_of,
)
from chairlift.api.anthropic.request import Turn

Message = dict[str, Any]


def messages_of(system: Sequence[TextBlockInput], turns: Sequence[Turn]) -> list[Message]:
    """The conversation. Turns of one role that follow each other are one message, as Anthropic
    has it; the result of a tool is a message of its own."""
    parts: list[Message] = []
    if system:
        parts.append({"role": "system", "content": text_of(system)})
    for turn in turns:
        parts += _of_assistant(turn) if turn.role == "assistant" else _of_others(turn)
    return [_joined(run) for run in _runs(parts)]


def _of_others(turn: Turn) -> list[Message]:
    parts: list[Message] = []
    for is_text, blocks in groupby(turn.content, lambda block: isinstance(block, TextBlockInput)):
        if is_text:
            texts = [block.text for block in blocks if isinstance(block, TextBlockInput)]
            parts.append({"role": turn.role, "content": "".join(texts)})
        else:
            parts += [_result(block) for block in blocks if isinstance(block, ToolResultBlockInput)]
    return parts


def _result(block: ToolResultBlockInput) -> Message:
    text = text_of(block.content)
    # Templates know of no field that says so.
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _of_assistant(turn: Turn) -> list[Message]:
    message: Message = {"role": "assistant"}
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


def _runs(parts: Sequence[Message]) -> Iterator[list[Message]]:
    """Parts of one role that follow each other; results of tools are each for themselves."""
    for role, run in groupby(parts, lambda part: part["role"]):
        if role == "tool":
            yield from ([part] for part in run)
        else:
            yield list(run)


def _joined(run: Sequence[Message]) -> Message:
    """One message of several of one role."""
    message = dict(run[0])
    for name in ("content", "reasoning_content"):
        texts = [part[name] for part in run if name in part]
        if texts:
            # NOTE: once for all of them: text by text would take the square of their number.
            message[name] = "\n\n".join(filter(None, texts)) if len(texts) > 1 else texts[0]
    if calls := [call for part in run for call in part.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message
