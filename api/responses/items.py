"""The input and output items of a response, as they are sent and stored."""

from __future__ import annotations

import re
import uuid
from typing import Literal

from msgspec import Struct

from chairlift.api.schemas.replies import TokenLogprob

_OWN_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    """A new id for an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


def is_own_id(item_id: str) -> bool:
    """Whether ``new_id`` made this id. Ids of clients, like "msg_1", need not be unique."""
    return _OWN_ID.fullmatch(item_id) is not None


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    image_url: str
    detail: str = "auto"


class OutputText(Struct, tag_field="type", tag="output_text"):
    """``annotations`` is always empty; clients expect the field."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class OutputRefusal(Struct, tag_field="type", tag="refusal"):
    """A refusal by another server's model; this server generates none."""

    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | InputImage | OutputText | OutputRefusal]
    status: ItemStatus = "completed"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """A model's reasoning. This server writes no summaries; ``summary`` comes from the client."""

    id: str
    content: list[ReasoningText]
    summary: list[SummaryText] = []
    status: ItemStatus = "completed"
    encrypted_content: None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A function call; its output refers to it by ``call_id``."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText | InputImage]
    status: ItemStatus = "completed"


class CompactionItem(Struct, tag_field="type", tag="compaction"):
    """A conversation's summary in encoded form; see ``compaction``."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem | CompactionItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem
