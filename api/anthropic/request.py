"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from chairlift.api.anthropic.blocks import (
    Blocks,
    DocumentBlockInput,
    ImageBlockInput,
    RedactedThinkingBlockInput,
    TextBlocks,
    ThinkingBlockInput,
    ToolResultBlockInput,
    ToolUseBlockInput,
)
from chairlift.api.schemas.field_types import Callers, Ignored, only
from chairlift.api.schemas.fields import JsonObject, Stops, known_kind
from chairlift.api.schemas.messages import MAX_MESSAGES
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.sampling_defaults import (
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from chairlift.api.schemas.schemas import MAX_SALT_CHARS
from chairlift.api.schemas.tools import MAX_TOOLS, Name
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import MAX_PRIORITY

_OF_ASSISTANT = (ThinkingBlockInput, RedactedThinkingBlockInput, ToolUseBlockInput)
_OF_USER = (ToolResultBlockInput, ImageBlockInput, DocumentBlockInput)


class Turn(Request):
    """A message. Only the assistant may use tools or have empty content, as at Anthropic."""

    role: Literal["user", "assistant", "system"]
    content: Blocks
    clear_at: Annotated[Any, *only("never")] = None
    output_config: Annotated[Any, *only({})] = None

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        if not self.content and self.role != "assistant":
            raise ValueError("content must hold at least one block")
        for block in self.content:
            if isinstance(block, _OF_ASSISTANT) and self.role != "assistant":
                raise ValueError(f"{block.type} blocks belong to assistant messages")
            if isinstance(block, _OF_USER) and self.role != "user":
                raise ValueError(f"{block.type} blocks belong to user messages")
        return self


def _tool_type(value: object) -> object:
    if isinstance(value, dict) and value.get("type") is None:
        value = {**value, "type": "custom"}
    return known_kind("tools", "custom")(value)


class AnthropicTool(Request):
    """A tool. ``defer_loading`` is ignored, and the input of every tool is streamed."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str = ""
    input_schema: JsonObject
    strict: bool = False
    allowed_callers: Callers | None = None
    input_examples: Annotated[Any, *only([])] = None
    cache_control: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None


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


ToolChoiceInput = AutoChoice | AnyChoice | OneToolChoice | NoneChoice


class _ThinkingDisplay(Request):
    """This server does not summarize reasoning; ``display`` shows or omits all of it."""

    display: Literal["summarized", "omitted"] = "summarized"
    # For reasoning with a wrong signature; this server checks none.
    block_binding: Ignored = None


class ThinkingEnabled(_ThinkingDisplay):
    """Anthropic's minimum budget is 1024; here any is allowed, because small models need less."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)]


class ThinkingDisabled(Request):
    type: Literal["disabled"]


class ThinkingAdaptive(_ThinkingDisplay):
    type: Literal["adaptive"]


class JsonSchemaOutput(Request):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


OutputFormat = Annotated[JsonSchemaOutput, BeforeValidator(known_kind("formats", "json_schema"))]


class OutputConfig(Request):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, *only()] = None


def _edit(value: object) -> object:
    match value:
        case {"type": "clear_thinking_20251015", "keep": "all" | {"type": "all"}}:
            return value
        case {"type": str(kind)}:
            raise ValueError(
                f"{kind[:64]!r} is not supported, only clear_thinking_20251015 that keeps all"
            )
    raise ValueError('must be an object with a "type"')


class ContextManagement(Request):
    """Accepts only edits that change nothing, which agents send by default."""

    edits: Annotated[list[Annotated[Any, BeforeValidator(_edit)]], Field(max_length=16)] = []


class MessagesPrompt(Request):
    """The fields that determine the prompt, also for count_tokens.

    If ``thinking`` is None, the model's default applies.
    """

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks = []
    tools: Annotated[
        list[Annotated[AnthropicTool, BeforeValidator(_tool_type)]], Field(max_length=MAX_TOOLS)
    ] = []
    tool_choice: Annotated[
        ToolChoiceInput,
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
    # The former name of output_config.format, while it was a beta.
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    billing_policy: Ignored = None
    speed: Annotated[Any, *only("standard")] = None
    mcp_servers: Annotated[Any, *only([])] = None

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        formats = (self.output_format, self.output_config.format)
        if None not in formats and formats[0] != formats[1]:
            raise RequestError("output_format: differs from output_config.format", "output_format")
        return self

    @property
    def shows_thoughts(self) -> bool:
        """Whether the reply contains the text of the model's reasoning."""
        thinking = self.thinking
        return not (isinstance(thinking, _ThinkingDisplay) and thinking.display == "omitted")

    @property
    def reply_format(self) -> JsonSchemaOutput | None:
        """The format that the reply must have; None means any text."""
        return self.output_config.format or self.output_format


class CountTokensRequest(MessagesPrompt):
    """POST /v1/messages/count_tokens. ``compaction`` is ignored."""

    compaction: Ignored = None


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages; ``priority``, ``timeout`` and ``cache_salt`` are extensions."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Stops = []
    stream: bool = False
    metadata: Ignored = None
    inference_geo: Ignored = None
    # It would explain why a prefix was not cached; ``usage`` has the number of cached tokens.
    diagnostics: Ignored = None
    # Other models for requests that a model declines by policy; this server declines none.
    fallbacks: Ignored = None
    fallback_credit_token: Ignored = None
    service_tier: Annotated[Any, *only("auto", "standard_only")] = None
    container: Annotated[Any, *only()] = None
    thread: Annotated[Any, *only()] = None
    compaction: Annotated[Any, *only()] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
