"""Handlers of POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.chat.prepare import prepare
from chairlift.api.generate.answer import answer, json_response
from chairlift.api.generate.body import convert, read
from chairlift.api.generate.continuation import prepare_continuation
from chairlift.api.generate.generation import Generation
from chairlift.api.generate.vectors import compute_vectors
from chairlift.api.ollama.dialogue import chat_request, completion_request, prompt_request
from chairlift.api.ollama.formatter import ChatFormatter, GenerateFormatter, nanoseconds, now
from chairlift.api.ollama.options import SAMPLING
from chairlift.api.ollama.replies import (
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGenerated,
    OllamaReplyMessage,
)
from chairlift.api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from chairlift.api.schemas.names import renamed_errors
from chairlift.api.schemas.schemas import EmbeddingRequest, EngineRequest, GenerationRequest
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.fill_in import fill_in_prompt
from chairlift.engine.errors import RequestError

_NAMES: Mapping[str, str] = {
    **{field: f"options.{option}" for field, option in SAMPLING.items()},
    "response_format": "format",
    "reasoning_effort": "think",
}
_GENERATE_NAMES: Mapping[str, str] = {**_NAMES, "messages": "prompt"}


async def ollama_chat(http: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    request = await read(http, OllamaChatRequest, declared=False)
    model = http.app[SERVICE].model(request.model)
    name = request.model or model.name
    if not request.messages:
        empty = OllamaReplyMessage("")
        return json_response(
            OllamaChat(model=name, created_at=now(), done=True, done_reason="load", message=empty)
        )
    with renamed_errors(_NAMES):
        body = await http.read()
        chat = await convert(http, (body,), chat_request, request, model.name, _thinks(model))
        # Like Ollama, accept a num_predict that exceeds the context.
        generation = await prepare(http, chat, "chat-", fit=True)
    formatter = ChatFormatter(generation, name, http[DEADLINE].arrival, request.logprobs)
    return await answer(http, chat, generation, formatter)


async def ollama_generate(http: web.Request) -> web.StreamResponse:
    """Answers a prompt, or continues it."""
    request = await read(http, OllamaGenerateRequest, declared=False)
    model = http.app[SERVICE].model(request.model)
    name = request.model or model.name
    if not (request.prompt or request.suffix or request.images):
        return json_response(
            OllamaGenerated(
                model=name, created_at=now(), done=True, done_reason="load", response=""
            )
        )
    with renamed_errors(_GENERATE_NAMES):
        generated, generation = await _prepare(http, request, model)
    formatter = GenerateFormatter(generation, name, http[DEADLINE].arrival, request.logprobs)
    return await answer(http, generated, generation, formatter)


async def _prepare(
    http: web.Request, request: OllamaGenerateRequest, model: ServedModel
) -> tuple[GenerationRequest, Generation]:
    """The request as a completion or a chat, and its generation."""
    if request.raw or request.suffix or not model.vocabulary.has_chat_template:
        prompt = await _plain_prompt(request, model)
        completion = completion_request(request, model.name, prompt)
        limit = request.options.max_tokens
        fills_in = bool(request.suffix)
        generation = await prepare_continuation(http, completion, "gen-", limit, fills_in=fills_in)
        return completion, generation
    body = await http.read()
    chat = await convert(http, (body,), prompt_request, request, model.name, _thinks(model))
    # Like Ollama, accept a num_predict that exceeds the context.
    return chat, await prepare(http, chat, "gen-", fit=True)


async def ollama_embed(http: web.Request) -> web.Response:
    """Computes one normalized vector per text. Without a text it only loads the model."""
    began = time.monotonic()
    request = await read(http, OllamaEmbedRequest, declared=False)
    model = http.app[SERVICE].model(request.model)
    if not request.input:
        took = nanoseconds(time.monotonic() - began)
        return json_response(OllamaEmbeddings(request.model or model.name, [], took, 0, 0))
    fields = EmbeddingRequest.model_validate(
        {
            **_engine_fields(request, model),
            "input": request.input,
            "dimensions": request.dimensions,
            "truncate_prompt_tokens": -1 if request.truncate else None,
        }
    )
    computed = await compute_vectors(http, fields)
    return json_response(
        OllamaEmbeddings(
            request.model or model.name,
            await computed.as_json(),
            nanoseconds(time.monotonic() - began),
            0,
            computed.prompt_tokens,
        )
    )


async def ollama_embeddings(http: web.Request) -> web.Response:
    """Computes the vector of one text, which is not normalized; see ``ollama_embed``."""
    request = await read(http, OllamaEmbeddingsRequest, declared=False)
    if not request.prompt:
        http.app[SERVICE].model(request.model)
        return json_response(OllamaEmbedding([]))
    fields = EmbeddingRequest.model_validate(
        {
            **_engine_fields(request, http.app[SERVICE].model(request.model)),
            "input": request.prompt,
            "normalize": False,
            "truncate_prompt_tokens": -1,
        }
    )
    with renamed_errors({"input": "prompt"}):
        computed = await compute_vectors(http, fields)
    [vector] = computed.vectors
    return json_response(OllamaEmbedding(vector.tolist()))


async def _plain_prompt(request: OllamaGenerateRequest, model: ServedModel) -> str | list[int]:
    """The prompt that the model continues without a chat template: a text, or token ids.

    Raises:
        RequestError: it has no place for a system prompt, or the model fills no gaps.
    """
    if request.system:
        raise RequestError("system: not with raw, suffix, or a model without a template", "system")
    if not request.suffix:
        return request.prompt
    if request.raw:
        raise RequestError("suffix: not with raw", "suffix")
    vocabulary = model.vocabulary
    chars = len(request.prompt) + len(request.suffix)
    vocabulary.check_chars(chars, model.info.max_context, "prompt")
    return await fill_in_prompt(vocabulary, request.prompt, request.suffix, param="suffix")


def _engine_fields(request: EngineRequest, model: ServedModel) -> dict[str, Any]:
    fields = request.model_dump(include={"cache_salt", "priority", "timeout"})
    return {**fields, "model": model.name}


def _thinks(model: ServedModel) -> bool:
    return model.vocabulary.format.thoughts is not None
