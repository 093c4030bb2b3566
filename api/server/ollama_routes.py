"""The routes of Ollama's API; see ``routes``."""

from __future__ import annotations

import msgspec

from chairlift.api.http.requests import Handler
from chairlift.api.http.sse import NDJSON
from chairlift.api.ollama import handlers as ollama
from chairlift.api.ollama import models as ollama_models
from chairlift.api.ollama import replies as ollama_replies
from chairlift.api.ollama import request as ollama_request
from chairlift.api.ollama.errors import OLLAMA_ERRORS
from chairlift.api.schemas.request import Request
from chairlift.api.server.route import Route


def _ollama(
    method: str,
    path: str,
    handler: Handler,
    summary: str,
    reply: type[msgspec.Struct],
    request: type[Request] | None = None,
    chunks: tuple[type[msgspec.Struct], ...] = (),
) -> Route:
    """A route of Ollama's API. Its version needs no key, like /version."""
    summary = f"{summary}, in Ollama's format"
    return Route(
        *(method, path, handler, summary, reply, request, chunks),
        error_format=OLLAMA_ERRORS,
        framing=NDJSON,
        is_free=path == "/api/version",
    )


OLLAMA_ROUTES: tuple[Route, ...] = (
    _ollama(
        "POST",
        "/api/chat",
        ollama.ollama_chat,
        "Answer a conversation",
        ollama_replies.OllamaChat,
        ollama_request.OllamaChatRequest,
        (ollama_replies.OllamaChat, ollama_replies.OllamaError),
    ),
    _ollama(
        "POST",
        "/api/generate",
        ollama.ollama_generate,
        "Answer or continue a prompt",
        ollama_replies.OllamaGenerated,
        ollama_request.OllamaGenerateRequest,
        (ollama_replies.OllamaGenerated, ollama_replies.OllamaError),
    ),
    _ollama(
        "POST",
        "/api/embed",
        ollama.ollama_embed,
        "Compute embeddings of texts",
        ollama_replies.OllamaEmbeddings,
        ollama_request.OllamaEmbedRequest,
    ),
    _ollama(
        "POST",
        "/api/embeddings",
        ollama.ollama_embeddings,
        "Compute the embedding of one text",
        ollama_replies.OllamaEmbedding,
        ollama_request.OllamaEmbeddingsRequest,
    ),
    _ollama(
        "POST",
        "/api/show",
        ollama_models.ollama_show,
        "Describe a model",
        ollama_replies.OllamaModelInfo,
        ollama_request.OllamaShowRequest,
    ),
    _ollama(
        "GET",
        "/api/tags",
        ollama_models.ollama_tags,
        "List the models",
        ollama_replies.OllamaModels,
    ),
    _ollama(
        "GET",
        "/api/ps",
        ollama_models.ollama_ps,
        "List the loaded models",
        ollama_replies.OllamaRunningModels,
    ),
    _ollama(
        "GET",
        "/api/version",
        ollama_models.ollama_version,
        "Get the version of Ollama's API",
        ollama_replies.OllamaVersion,
    ),
)
