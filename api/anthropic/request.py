"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from chairlift.api.anthropic.blocks import (
    Blocks,
    TextBlocks,
    ThinkingBlockInput,
    ToolResultBlockInput,
    ToolUseBlockInput,
)
from chairlift.api.fields import JsonObject, Stops, known_kind
from chairlift.api.messages import MAX_MESSAGES
from chairlift.api.request import Request
from chairlift.api.schemas import MAX_SALT_CHARS
from chairlift.api.tools import MAX_TOOLS, Name
from chairlift.engine.messages import MAX_PRIORITY


class Turn(Request):
    """A message. Who may say what is Anthropic's: tools are used by the assistant only, who alone
    may say nothing."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _is_said_by_this_role(self) -> Self:
        if not self.content and self.role != "assistant":
            raise ValueError("content must hold at least one block")
        for block in self.content:
            match block:
                case ThinkingBlockInput() | ToolUseBlockInput() if self.role != "assistant":
                    raise ValueError(f"{block.type} blocks belong to assistant messages")
                case ToolResultBlockInput() if self.role != "user":
                    raise ValueError("tool_result blocks belong to user messages")
        return self


def _tool_type(value: object) -> object:
    if isinstance(value, dict) and value.get("type") is None:
        value = {**value, "type": "custom"}
    return known_kind("tools", "custom")(value)


class AnthropicTool(Request):
    type: Literal["custom"] = "custom"
    name: Name
    description: str = ""
    input_schema: JsonObject
    strict: bool = False


class AutoChoice(Request):
    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Request):
    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class OneToolChoice(Request):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool = False


class NoneChoice(Request):
    type: Literal["none"]


Choice = AutoChoice | AnyChoice | OneToolChoice | NoneChoice


class ThinkingEnabled(Request):
    """Anthropic's least budget is 1024; a small model may be given less."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)]


class ThinkingDisabled(Request):
    type: Literal["disabled"]


class ThinkingAdaptive(Request):
    type: Literal["adaptive"]


class JsonSchemaOutput(Request):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Request):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: (
        Annotated[JsonSchemaOutput, BeforeValidator(known_kind("formats", "json_schema"))] | None
    ) = None


class MessagesPrompt(Request):
    """All that the prompt is made of; also the body of count_tokens. ``thinking`` None: as the
    model does it."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks = []
    tools: Annotated[
        list[Annotated[AnthropicTool, BeforeValidator(_tool_type)]], Field(max_length=MAX_TOOLS)
    ] = []
    tool_choice: Annotated[
        Choice,
        Field(discriminator="type"),
        BeforeValidator(known_kind("tool choices", "auto", "any", "tool", "none")),
    ] = AutoChoice(type="auto")
    thinking: (
        Annotated[
            ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive,
            Field(discriminator="type"),
            BeforeValidator(known_kind("thinking", "enabled", "disabled", "adaptive")),
        ]
        | None
    ) = None
    output_config: OutputConfig = OutputConfig()


class CountTokensRequest(MessagesPrompt):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages. ``priority``, ``timeout`` and ``cache_salt`` are as the other doors'."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Stops = []
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
