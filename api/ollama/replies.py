"""The reply bodies of Ollama's API, which are also the lines of its streams."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from chairlift.api.schemas.replies import TokenLogprob


class OllamaError(Struct):
    error: str


class OllamaCallFunction(Struct):
    """A called function; ``arguments`` is an object, as the model wrote it."""

    index: int
    name: str
    arguments: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class OllamaCall(Struct):
    id: str
    function: OllamaCallFunction


class OllamaReplyMessage(Struct):
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaReply(Struct, kw_only=True):
    """The fields of chat and generate replies. Durations are in nanoseconds.

    The fields from ``done_reason`` on are absent in all lines of a stream but the last.
    """

    model: str
    created_at: datetime
    done: bool = False
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaReply, kw_only=True):
    message: OllamaReplyMessage


class OllamaGenerated(OllamaReply, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


_Vector = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "number"}})]


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[_Vector]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """The reply of the older /api/embeddings."""

    embedding: list[float]


class OllamaDetails(Struct):
    """Facts of a model; empty where the server does not know one."""

    format: str
    family: str
    families: list[str]
    quantization_level: str
    parent_model: str = ""
    parameter_size: str = ""


class OllamaModel(Struct):
    """A model. ``size`` is that of its weights in memory, in bytes."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaRunningModel(Struct):
    """A loaded model. ``size_vram`` is the part of ``size`` in a GPU's memory."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaRunningModels(Struct):
    models: list[OllamaRunningModel]


class OllamaModelInfo(Struct):
    modelfile: str
    template: str
    parameters: str
    license: str
    details: OllamaDetails
    model_info: dict[str, str | int | None]
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(Struct):
    version: str
