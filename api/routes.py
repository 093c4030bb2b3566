"""The routes as data: the app serves them, /openapi.json lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from chairlift.api import replies, schemas
from chairlift.api.chat import chat_completions
from chairlift.api.completions import completions
from chairlift.api.embeddings import embeddings
from chairlift.api.request import Request
from chairlift.api.status import get_model, health, list_models, version
from chairlift.api.tokens import detokenize, tokenize, tokenizer_info

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``chunk`` is what its stream consists of, if it can stream."""

    method: str
    path: str
    handler: Handler
    summary: str
    reply: type[msgspec.Struct]
    request: type[Request] | None = None
    chunk: type[msgspec.Struct] | None = None


ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        replies.ChatCompletion,
        schemas.ChatRequest,
        replies.ChatChunk,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Continue prompts",
        replies.Completion,
        schemas.CompletionRequest,
        replies.Completion,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        "Turn texts into vectors",
        replies.EmbeddingList,
        schemas.EmbeddingRequest,
    ),
    Route("GET", "/v1/models", list_models, "List the models", replies.ModelList),
    Route("GET", "/v1/models/{id}", get_model, "Describe a model", replies.ModelCard),
    Route(
        "POST",
        "/tokenize",
        tokenize,
        "Turn text or messages into tokens",
        replies.TokenizeReply,
        schemas.TokenizeRequest,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "Turn tokens into text",
        replies.DetokenizeReply,
        schemas.DetokenizeRequest,
    ),
    Route(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "Tell the tokenizer's special tokens",
        replies.TokenizerInfo,
    ),
    Route("GET", "/health", health, "Tell whether requests can be served", replies.HealthReply),
    Route("GET", "/ping", health, "The same as /health", replies.HealthReply),
    Route("POST", "/ping", health, "The same as /health", replies.HealthReply),
    Route("GET", "/version", version, "Tell the version", replies.VersionReply),
)
