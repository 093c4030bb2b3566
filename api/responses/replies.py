"""The reply bodies of the Responses API, and a response as it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from chairlift.api.responses.items import CompactionItem, Item, MessageItem, OutputItem

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

# Approximate memory of a stored response besides its JSON; it limits the number of small ones.
ENTRY_BYTES = 1024
# Approximate memory of an item's id in the index.
ITEM_BYTES = 256
# Approximate memory of an event besides its bytes.
EVENT_BYTES = 64

_ITEMS = msgspec.json.Decoder(list[Item])


class InputTokensDetails(Struct):
    """``cached_tokens`` is the number of input tokens that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Response(Struct, kw_only=True):
    """A response, complete or in progress. Many fields repeat those of the request."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    background: bool = False
    service_tier: Literal["default"] = "default"
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class InputTokens(Struct):
    """The number of tokens of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class CompactedResponse(Struct):
    """The items that replace a conversation; the last one is its compaction."""

    id: str
    created_at: int
    output: list[MessageItem | CompactionItem]
    usage: ResponseUsage
    object: Literal["response.compaction"] = "response.compaction"


class InputItemList(Struct):
    """A page of the input items of a response; the ids are null on an empty page."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(Struct):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response.

    Attributes:
        id: the response's id.
        reply: the response as JSON.
        inputs: a JSON list of the items before it: the earlier conversation and the request's
            input.
        item_ids: the ids of the items that later requests can refer to.
        events: the events of its stream, framed, if it was generated in the background with a
            stream; else None.
    """

    id: str
    reply: bytes
    inputs: bytes
    item_ids: tuple[str, ...] = ()
    events: tuple[bytes, ...] | None = None

    @property
    def size(self) -> int:
        """The number of bytes that count against the store's limit."""
        ids = len(self.item_ids) * ITEM_BYTES
        events = sum(len(event) + EVENT_BYTES for event in self.events or ())
        return len(self.reply) + len(self.inputs) + ids + events + ENTRY_BYTES

    def input_items(self) -> list[Item]:
        """The items before the response."""
        return _ITEMS.decode(self.inputs)

    def conversation(self) -> list[Item]:
        """The items before the response, and its output."""
        return [*self.input_items(), *msgspec.json.decode(self.reply, type=Response).output]
