"""OpenAI's requests as pydantic models: fields, types and ranges."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

import pydantic
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from chairlift.api.schemas.decoding import (
    NotFinite,
    RefusedValue,
    decoded,
    place_in,
    without_mark,
)
from chairlift.api.schemas.fields import (
    MAX_TOKENS,
    LogitBias,
    Prompts,
    Stops,
    TextContent,
    TokenId,
)
from chairlift.api.schemas.messages import Messages
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.sampling_defaults import (
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from chairlift.api.schemas.structured import Structured
from chairlift.api.schemas.templating import Templating
from chairlift.api.schemas.unsupported import check_extra_fields
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import MAX_PRIORITY, MAX_TOP_LOGPROBS, Pooling

MAX_CHOICES = 128
# 256 random bits take 43 characters of base64; longer salts separate clients no better.
MAX_SALT_CHARS = 256


class StreamOptions(Request):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class EngineRequest(Request):
    """Fields of all requests that the engine handles: model, cache salt, priority, time limit."""

    model: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None


class GenerationRequest(Structured, EngineRequest):
    """Fields of all requests that generate text: sampling, stopping, streaming."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] = []
    include_stop_str_in_output: bool = False
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        check_stream_options(self.stream, self.stream_options)
        return self


def check_stream_options(stream: bool, options: Request | None) -> None:
    """Raises RequestError if there are options for a stream, but no stream is requested."""
    if options is not None and not stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")


class Prediction(Request):
    """A text that the reply is expected to repeat in large part."""

    type: Literal["content"]
    content: TextContent


class ChatRequest(GenerationRequest, Templating):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        self.check_end(self.messages)
        return self

    @model_validator(mode="after")
    def _a_call_has_one_form(self) -> Self:
        """Refuses a required call together with a grammar for all of the reply.

        ``response_format`` is allowed, because it does not apply to calls.
        """
        if self.effective_choice.mode == "required":
            for param, _ in self.grammar_requests:
                if param != "response_format":
                    raise RequestError(
                        f"{param}: cannot be combined with a tool_choice that requires a call",
                        param,
                    )
        return self


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool = False
    # 0 generates nothing: with echo, the reply is the prompt only.
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _supported_combinations(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: must be at least 1, or 0 with echo", "max_tokens")
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("best_of other than n is not supported", "best_of")
        return self


class EmbeddingRequest(EngineRequest):
    """POST /v1/embeddings.

    ``pooling`` None means the server's default, and ``dimensions`` None means all. Longer texts are
    truncated to ``truncate_prompt_tokens``; -1 truncates them to the context.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    pooling: Pooling | None = None
    normalize: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _truncation_leaves_tokens(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens: must be at least 1, or -1", "truncate_prompt_tokens"
            )
        return self


class TokenizeRequest(Templating):
    """POST /tokenize, with ``prompt`` or ``messages``. Templating's fields are for ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of prompt and messages must be given", "prompt")
        if self.messages is not None:
            self.check_end(self.messages)
        return self


class DetokenizeRequest(Request):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


RequestT = TypeVar("RequestT", bound=Request)
# Pydantic's errors of a value that is no object.
_OBJECT_ERRORS = ("model_type", "model_attributes_type", "dict_type")


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Validates a JSON body as a request; a byte order mark before the JSON is ignored.

    Raises:
        RequestError: the body is not JSON, its fields contradict each other, or it has a known
            field that is not supported.
        pydantic.ValidationError: a field is missing, of the wrong type or out of range.
    """
    if not without_mark(body):
        raise RequestError("the body is empty; it must be a JSON object")
    try:
        data = decoded(body)
    except RefusedValue as refused:
        if isinstance(refused, NotFinite):
            # The field's own error says which numbers it takes.
            _validated(kind, refused.document)
        raise RequestError(str(refused), refused.path) from None
    except ValueError as error:
        raise RequestError(f"the body is {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    request = _validated(kind, data)
    check_extra_fields(request, generates="stream" in kind.model_fields)
    return request


def _validated(kind: type[RequestT], data: object) -> RequestT:
    """The request; the first error's location is a path in ``data``.

    Raises:
        RequestError: its fields contradict each other.
        pydantic.ValidationError: a field is missing, of the wrong type or out of range.
    """
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Pydantic's message names a class.
        message = "must be an object" if first["type"] in _OBJECT_ERRORS else first["msg"]
        raise pydantic.ValidationError.from_exception_data(
            error.title,
            [
                {
                    "type": PydanticCustomError("invalid", "{message}", {"message": message}),
                    "loc": place_in(data, first["loc"]),
                    "input": None,
                }
            ],
        ) from None
