"""The bodies of POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from chairlift.api.responses.hosted import Id
from chairlift.api.responses.inputs import Input
from chairlift.api.responses.tools import ToolChoiceField, Tools
from chairlift.api.schemas.field_types import Ignored, only
from chairlift.api.schemas.fields import JsonObject, Metadata, known_kind
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.sampling_defaults import (
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from chairlift.api.schemas.schemas import MAX_SALT_CHARS, check_stream_options
from chairlift.api.schemas.tools import Name
from chairlift.engine.messages import MAX_PRIORITY, MAX_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
# All but the first are about hosted tools and encrypted reasoning, which this server does not have.
# They are accepted and have no effect.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class TextFormat(Request):
    type: Literal["text"]


class JsonObjectFormat(Request):
    type: Literal["json_object"]


class JsonSchemaFormat(Request):
    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[JsonObject, Field(alias="schema")]
    description: str = ""
    strict: bool = False


class TextConfig(Request):
    format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat,
        Field(discriminator="type"),
        BeforeValidator(known_kind("formats", "text", "json_object", "json_schema")),
    ] = TextFormat(type="text")
    verbosity: Annotated[Any, *only("medium")] = None


class Reasoning(Request):
    """The reply always contains the reasoning. A summary may be requested, but is never written."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    # The chat template decides which reasoning of earlier turns the model sees.
    context: Annotated[Any, *only("auto")] = None
    mode: Annotated[Any, *only("standard")] = None


class ResponseStreamOptions(Request):
    include_obfuscation: bool = False


class Conversation(Request):
    """The conversation: that of ``previous_response_id``, if given, and then ``input``."""

    model: str | None = None
    input: Input = []
    instructions: str | None = None
    previous_response_id: Id | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    # It affects scheduling on OpenAI's servers only; the reply has "default".
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None


class ResponsesPrompt(Conversation):
    """The fields that determine the prompt."""

    tools: Tools = []
    tool_choice: ToolChoiceField = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    # No part of a prompt is ever dropped: one that is too long is refused.
    truncation: Annotated[Any, *only("disabled", "auto")] = None
    conversation: Annotated[Any, *only()] = None


class InputTokensRequest(ResponsesPrompt):
    """POST /v1/responses/input_tokens."""

    personality: Annotated[Any, *only()] = None


class CompactRequest(Conversation):
    """POST /v1/responses/compact; ``priority``, ``timeout`` and ``cache_salt`` are extensions.

    Agents also send the fields of an ordinary request, which a summary does not need.
    """

    tools: Ignored = None
    tool_choice: Ignored = None
    parallel_tool_calls: Ignored = None
    reasoning: Ignored = None
    text: Ignored = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None


class ResponsesRequest(ResponsesPrompt):
    """POST /v1/responses. If ``store`` is None, the server's default applies."""

    store: bool | None = None
    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Include], Field(max_length=16)] = []
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    metadata: Metadata = {}
    user: str | None = None
    safety_identifier: Ignored = None
    # It limits calls of hosted tools only.
    max_tool_calls: Ignored = None
    context_management: Annotated[Any, *only([])] = None
    moderation: Annotated[Any, *only()] = None
    prompt: Annotated[Any, *only()] = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        check_stream_options(self.stream, self.stream_options)
        return self

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are requested."""
        return LOGPROBS in self.include or self.top_logprobs > 0
