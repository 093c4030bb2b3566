"""Converts items to the messages of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.api.responses.compaction import opened
from chairlift.api.responses.items import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputRefusal,
    OutputText,
    ReasoningItem,
)

MessageFields = dict[str, Any]

_Part = InputText | InputImage | OutputText | OutputRefusal

# Precedes the summary that replaces an earlier conversation.
_SUMMARY = "Summary of the conversation so far:\n"


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[MessageFields]:
    """The messages of the conversation. All output of one model turn becomes one message.

    A turn with calls ends with their results, which must directly follow the message of all
    these calls; any other turn ends with its text.
    """
    messages: list[MessageFields] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: MessageFields | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if turn is None or _has_ended(turn):
                    turn = _begin_turn(messages)
                turn["content"] = turn.get("content", "") + "".join(map(_shown, item.content))
            case ReasoningItem():
                if turn is None or _has_ended(turn):
                    turn = _begin_turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought_of(item)
            case FunctionCallItem():
                turn = turn or _begin_turn(messages)
                turn.setdefault("tool_calls", []).append(_call_of(item))
            case MessageItem():
                turn = None
                messages.append({"role": item.role, "content": _content_of(item.content)})
            case CompactionItem():
                turn = None
                summary = opened(item.encrypted_content)
                messages.append({"role": "user", "content": _SUMMARY + summary})
            case FunctionCallOutputItem():
                turn = None
                output = item.output
                content = output if isinstance(output, str) else _content_of(output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    return messages


def _begin_turn(messages: list[MessageFields]) -> MessageFields:
    turn: MessageFields = {"role": "assistant"}
    messages.append(turn)
    return turn


def _has_ended(turn: MessageFields) -> bool:
    return "content" in turn and "tool_calls" not in turn


def _content_of(parts: Sequence[_Part]) -> str | list[dict[str, Any]]:
    """The content of a chat message: the joined texts, or parts if there are images."""
    if not any(isinstance(part, InputImage) for part in parts):
        return "".join(map(_shown, parts))
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": _shown(part)}
        for part in parts
    ]


def _shown(part: _Part) -> str:
    match part:
        case OutputRefusal():
            return part.refusal
        case InputImage():
            return ""
    return part.text


def _thought_of(item: ReasoningItem) -> str:
    # Reasoning of another server may have a summary only.
    return "".join(part.text for part in item.content or item.summary)


def _call_of(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}
