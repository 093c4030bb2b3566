"""From Anthropic's turns to the messages of a conversation, as chat requests have them."""

from __future__ import annotations

from collections.abc import Sequence
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
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": text_of(system)})
    for turn in turns:
        for part in _of_assistant(turn) if turn.role == "assistant" else _of_others(turn):
            _append(messages, part)
    return messages


def _of_others(turn: Turn) -> list[Message]:
    parts: list[Message] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlockInput):
            text = text_of(block.content)
            # Templates know of no field that says so.
            content = f"Error: {text}" if block.is_error else text
            parts.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, TextBlockInput):
            if parts and parts[-1]["role"] == turn.role:
                parts[-1]["content"] += block.text
            else:
                parts.append({"role": turn.role, "content": block.text})
    return parts


def _of_assistant(turn: Turn) -> list[Message]:
    message: Message = {"role": "assistant"}
    for block in turn.content:
        match block:
            case TextBlockInput():
                message["content"] = message.get("content", "") + block.text
            case ThinkingBlockInput():
                thought = message.get("reasoning_content", "") + block.thinking
                message["reasoning_content"] = thought
            case ToolUseBlockInput():
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return [message]


def _append(messages: list[Message], part: Message) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != part["role"] or part["role"] == "tool":
        messages.append(part)
        return
    for name in ("content", "reasoning_content"):
        if name in part:
            last[name] = "\n\n".join(filter(None, (last.get(name), part[name])))
    if "tool_calls" in part:
        last.setdefault("tool_calls", []).extend(part["tool_calls"])
