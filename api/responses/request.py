"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from chairlift.api.fields import JsonObject, known_kind
from chairlift.api.request import Request
from chairlift.api.responses.inputs import Id, Input
from chairlift.api.schemas import MAX_SALT_CHARS
from chairlift.api.tools import MAX_TOOLS, Function, Name
from chairlift.engine.messages import MAX_PRIORITY, MAX_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"

MAX_METADATA = 16


def _few(value: object) -> object:
    # Before each of a million pairs is looked at.
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"must hold at most {MAX_METADATA} pairs")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_few),
]


class FunctionTool(Function):
    """As in chat, but flat."""

    type: Literal["function"]


class FunctionChoice(Request):
    type: Literal["function"]
    name: Name


Choice = Literal["none", "auto", "required"] | FunctionChoice


def _choice(value: object) -> Choice:
    match value:
        case "none" | "auto" | "required":
            return value
        case str():
            raise ValueError("must be none, auto, required, or an object")
    return FunctionChoice.model_validate(known_kind("tool choices", "function")(value))


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


class Reasoning(Request):
    """A summary may be asked for; there is none, and the reasoning itself is always told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Request):
    include_obfuscation: bool = False


class ResponsesRequest(Request):
    """``store`` None: as the server does it."""

    model: str | None = None
    input: Input = []
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
        Field(max_length=16),
    ] = []
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(known_kind("tools", "function"))],],
        Field(max_length=MAX_TOOLS),
    ] = []
    tool_choice: Annotated[Choice, PlainValidator(_choice, json_schema_input_type=Choice)] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    metadata: Metadata = {}
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None

    @property
    def logprobs(self) -> bool:
        """Whether each token's log-probability is asked for."""
        return LOGPROBS in self.include or self.top_logprobs > 0
