"""OpenAI's reply bodies and stream chunks as msgspec structs, which encode fast.

/openapi.json describes replies by these structs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from chairlift.api.schemas.sampling_defaults import SamplingDefaults

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorDetail


class PromptTokensDetails(Struct):
    """``cached_tokens`` is the number of prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Parts of the output.

    ``reasoning_tokens`` is the number of output tokens inside thoughts, tags included.
    ``accepted_prediction_tokens`` are those that were proposed before they were computed, by the
    request's prediction or the server; ``rejected_prediction_tokens`` is the number of other
    proposed tokens, which are not part of the output.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Token counts. The end-of-text token that ends a choice is counted.

    ``completion_tokens_details`` is present for models that mark their reasoning, for requests with
    a prediction, and on servers with speculative decoding.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """The values of a prompt's first token are null, because no token precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class FunctionCallReply(Struct):
    """``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCallReply(Struct):
    id: str
    function: FunctionCallReply
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """``content`` is null if the message consists of calls only."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class FunctionCallDelta(Struct, omit_defaults=True):
    """The concatenated ``arguments`` of a call's deltas are one JSON text."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, omit_defaults=True):
    """``id``, ``type`` and the function's name are in the first delta of each call only."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(Struct):
    """``usage`` is absent unless ``stream_options`` request it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(Struct):
    """``finish_reason`` is null only in a stream's chunks before the choice's last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(Struct):
    """A complete reply, or one chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


_EMBEDDING = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(Struct):
    """``embedding`` is a list of numbers, or little-endian float32 in base64."""

    embedding: Annotated[Raw, Meta(extra_json_schema=_EMBEDDING)]
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(Struct):
    """``root`` is the model's own name, like a hub id; clients find its tokenizer by it.

    ``default_sampling_params`` is the sampling of requests that give no value of their own.
    ``input_modalities`` is what messages may consist of: "text", and "image" for a vision model
    images. These and ``max_model_len`` are null until the model was loaded once. ``reason`` is why
    a failed model cannot be served. Of a LoRA adapter, ``root`` is the folder of its files and
    ``parent`` the model that it changes.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    default_sampling_params: SamplingDefaults | None
    state: Literal["loaded", "loading", "unloading", "unloaded", "failed"] = "loaded"
    aliases: Sequence[str] = ()
    reason: str | UnsetType = UNSET
    object: Literal["model"] = "model"
    owned_by: str = "chairlift"
    parent: str | None = None
    input_modalities: Sequence[str] | None = None


class UnloadedAdapter(Struct):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct):
    """The texts of special tokens; null if the tokenizer has no such token."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None


class DetokenizeReply(Struct):
    prompt: str


class HealthReply(Struct):
    """The state of the server.

    Attributes:
        reason: why requests cannot be served now; absent if they can.
        models: the state of each model, on a server of several.
        degraded: which of several engines do not serve now, and why; absent if all do.
    """

    status: Literal["ok", "unavailable"]
    reason: str | UnsetType = UNSET
    models: Mapping[str, str] | UnsetType = UNSET
    degraded: str | UnsetType = UNSET


class VersionReply(Struct):
    version: str
