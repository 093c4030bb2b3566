"""The items of a response, as they are sent and stored: what went in and what came out."""

from __future__ import annotations

import re
import uuid
from typing import Literal

from msgspec import Struct

from chairlift.api.schemas.replies import TokenLogprob

_OWN_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    """An id for an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


def is_own_id(item_id: str) -> bool:
    """Whether ``new_id`` made this id. A client's own ("msg_1") may be another client's too."""
    return _OWN_ID.fullmatch(item_id) is not None


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    """``annotations`` are there because clients expect them; nothing here cites anything."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class OutputRefusal(Struct, tag_field="type", tag="refusal"):
    """What another server's model said instead of a reply; no model here marks one."""

    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | OutputRefusal]
    status: ItemStatus = "completed"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """What the model thought. There is nothing here to summarize it: ``summary`` is a client's."""

    id: str
    content: list[ReasoningText]
    summary: list[SummaryText] = []
    status: ItemStatus = "completed"
    encrypted_content: None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """``call_id`` is what the call's output names."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class CompactionItem(Struct, tag_field="type", tag="compaction"):
    """A conversation's summary, see ``compaction``."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem
