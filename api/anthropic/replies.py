"""The reply bodies of the Messages API, and the events of its streams.

A struct's tag is the event's name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool call; ``input`` is JSON as the model wrote it."""

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    """As at Anthropic, ``input_tokens`` excludes tokens that came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class AnthropicMessage(Struct):
    """A complete reply or, at the start of a stream, an empty one."""

    id: str
    model: str
    content: list[ContentBlock]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokensCount(Struct):
    input_tokens: int


class ThreadRefusal(Struct):
    """Tells Anthropic's clients to send the whole conversation, without ``thread``."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: ThreadRefusal | UnsetType = UNSET


class AnthropicError(Struct, tag_field="type", tag="error"):
    """The body of an error reply, and the event that ends a stream with an error."""

    error: AnthropicErrorDetail
    request_id: str


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
EVENTS: tuple[type[Struct], ...] = (
    *(MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop),
    AnthropicError,
)
