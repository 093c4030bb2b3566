"""Converts items to the messages of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.api.responses.compaction import opened
from chairlift.api.responses.items import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    OutputRefusal,
    ReasoningItem,
)

MessageFields = dict[str, Any]

# Precedes the summary that replaces an earlier conversation.
_SUMMARY = "Summary of the conversation so far:\n"


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[MessageFields]:
    """The messages of the conversation. All output of one model turn becomes one message."""
    messages: list[MessageFields] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: MessageFields | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if turn is None or "content" in turn or "tool_calls" in turn:
                    turn = _begin_turn(messages)
                turn["content"] = _text_of(item)
            case ReasoningItem():
                if turn is None or len(turn) > 1:
                    turn = _begin_turn(messages)
                turn["reasoning_content"] = _thought_of(item)
            case FunctionCallItem():
                turn = turn or _begin_turn(messages)
                turn.setdefault("tool_calls", []).append(_call_of(item))
            case MessageItem():
                turn = None
                messages.append({"role": item.role, "content": _text_of(item)})
            case CompactionItem():
                turn = None
                summary = opened(item.encrypted_content)
                messages.append({"role": "user", "content": _SUMMARY + summary})
            case FunctionCallOutputItem():
                turn = None
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                )
    return messages


def _begin_turn(messages: list[MessageFields]) -> MessageFields:
    turn: MessageFields = {"role": "assistant"}
    messages.append(turn)
    return turn


def _text_of(item: MessageItem) -> str:
    return "".join(
        part.refusal if isinstance(part, OutputRefusal) else part.text for part in item.content
    )


def _thought_of(item: ReasoningItem) -> str:
    # Reasoning of another server may have a summary only.
    return "".join(part.text for part in item.content or item.summary)


def _call_of(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}
