"""The reply bodies of the Responses API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from chairlift.api.responses.items import CompactionItem, Item, MessageItem, OutputItem

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


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
