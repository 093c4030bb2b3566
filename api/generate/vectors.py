"""Computes the embeddings of a request's texts."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.priority import priority_of
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.generate.generation import Generation, TokenPrompt
from chairlift.api.generate.model_lease import leased_model
from chairlift.api.generate.prompt_tokens import prompt_tokens
from chairlift.api.generate.sampling import room_for
from chairlift.api.observe.request_record import GENERATION
from chairlift.api.schemas.schemas import EmbeddingRequest, GenerationRequest
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.choice import VectorChoice
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import SamplingParams

# OpenAI's limit.
MAX_INPUTS = 2048
# The engine only computes the prompt and generates nothing.
_NOTHING = SamplingParams(max_tokens=0, seed=0)


class Vectors(NamedTuple):
    """The embeddings of a request, float32 in the order of its texts, and its prompt tokens."""

    vectors: list[np.ndarray[tuple[int], np.dtype[np.float32]]]
    prompt_tokens: int
    model: ServedModel

    async def as_json(self) -> list[msgspec.Raw]:
        """Each vector as a list of numbers in JSON.

        The event loop goes on between two vectors: a thousand of 4,096 numbers take a second.
        """
        texts: list[msgspec.Raw] = []
        for vector in self.vectors:
            texts.append(msgspec.Raw(msgspec.json.encode(vector.tolist())))
            await asyncio.sleep(0)
        return texts


async def compute_vectors(http: web.Request, request: EmbeddingRequest) -> Vectors:
    """Computes one vector for each text of ``request``, with the dimensions that it asks for.

    Raises:
        NotReady, UnknownModel, QueueFull, RateLimited: this server cannot serve it, or not now.
        PromptTooLong, ContextExceeded, RequestError: this model cannot serve it; ``param`` is the
            name of a field of EmbeddingRequest.
        TimedOut, Draining: the request's time limit has passed, or the server is shutting down.
    """
    service = http.app[SERVICE]
    deadline = http[DEADLINE]
    deadline.tighten(request.timeout)
    priority = priority_of(request, http.headers)
    model = leased_model(http, request.model)
    _check(request, model)
    # Submitting more prompts than there are rows would gain nothing and fill the queue.
    at_once = model.info.max_rows
    model.client.check_room(min(len(request.input), at_once), priority)
    pooling = request.pooling or model.pooling
    prompts = []
    async with deadline.limit():
        for text in request.input:
            most = _max_input_tokens(request, model)
            tokens = await prompt_tokens(model, text, request.add_special_tokens, "input", most)
            room_for(model.info, len(tokens), 0, "input")
            prompts.append(TokenPrompt(tokens, _NOTHING, pooling=pooling))
            # Yield to the event loop between texts: thousands of them must not block all streams.
            await asyncio.sleep(0)
    name = f"embd-{uuid.uuid4().hex}"
    defaults = GenerationRequest(cache_salt=request.cache_salt)
    account = http[ACCOUNT]
    generation = Generation(
        model, service.recorder, defaults, name, prompts, priority, account, at_once
    )
    http[GENERATION] = generation
    try:
        with service.live.riding(generation):
            generation.submit(deadline.arrival)
            async with deadline.limit(), aclosing(generation.deltas()) as steps:
                async for _ in steps:
                    pass  # each choice keeps its vector; there is no text to send
    finally:
        generation.close()
    vectors = [
        _vector(request, choice.vector)
        for choice in generation.choices
        if isinstance(choice, VectorChoice)
    ]
    return Vectors(vectors, generation.usage().prompt_tokens, model)


def _check(request: EmbeddingRequest, model: ServedModel) -> None:
    """Checks the request against the model.

    Raises:
        RequestError: this model cannot compute the requested embeddings.
    """
    size = model.info.hidden_size
    if size is None:
        raise RequestError(
            f"the model {model.name!r} gives no embeddings: its architecture "
            f"({model.info.architecture}) does not show its last hidden states",
            "model",
        )
    if request.dimensions is not None and request.dimensions > size:
        raise RequestError(
            f"dimensions: at most {size}, the model's hidden size, not {request.dimensions}",
            "dimensions",
        )
    if len(request.input) > MAX_INPUTS:
        raise RequestError(f"input: at most {MAX_INPUTS} texts in one request", "input")


def _max_input_tokens(request: EmbeddingRequest, model: ServedModel) -> int | None:
    limit = request.truncate_prompt_tokens
    return model.info.max_context if limit == -1 else limit


def _vector(request: EmbeddingRequest, raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    vector = np.frombuffer(raw, np.float32)[: request.dimensions]
    if not request.normalize:
        return vector
    # A zero vector has no direction and stays as it is.
    return vector / (np.linalg.norm(vector) or np.float32(1))
