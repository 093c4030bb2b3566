"""Every JSON reply as a msgspec struct: encoded fast while streaming, and the source of the
replies' schemas in /openapi.json."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorDetail


class PromptTokensDetails(Struct):
    """Of the prompt tokens, those that were taken from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the output tokens, those that were thought, with the tags around them."""

    reasoning_tokens: int


class Usage(Struct):
    """Token counts; an end-of-text token that ended a choice is counted.

    ``completion_tokens_details`` is there for models that think.
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
    """Null are those of a prompt's first token, which nothing comes before."""

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
    """``content`` is null where there are only calls."""

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
    """All ``arguments`` of a call, one after the other, are one JSON text."""

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
    """``usage`` is absent unless stream_options.include_usage asked for it."""

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
    """A whole completion, or one chunk of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class Embedding(Struct):
    """Numbers, or their float32 in base64, lowest byte first."""

    embedding: list[float] | str
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
    """``root`` is the model's own name, which its tokenizer is found by: a hub id, perhaps."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "chairlift"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct):
    """The special tokens that have a role, as text; null where the tokenizer has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None


class DetokenizeReply(Struct):
    prompt: str


class HealthReply(Struct):
    """``reason`` says why requests cannot be served now."""

    status: Literal["ok", "unavailable"]
    reason: str | UnsetType = UNSET


class VersionReply(Struct):
    version: str
