"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET

from chairlift.api.answer import WholeChoice, answer
from chairlift.api.body import read
from chairlift.api.deadline import DEADLINE
from chairlift.api.generation import Generation, TokenPrompt
from chairlift.api.logprobs import Scored, chat_logprobs
from chairlift.api.priority import priority_of
from chairlift.api.ratelimit import ACCOUNT
from chairlift.api.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Finish,
    Usage,
)
from chairlift.api.sampling import sampling_params
from chairlift.api.schemas import ChatRequest, chars_of
from chairlift.api.service import SERVICE


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = http.app[SERVICE]
    deadline = http[DEADLINE]
    request = await read(http, ChatRequest)
    deadline.tighten(request.timeout)
    priority = priority_of(request, http.headers)
    model = service.model(request.model)
    # Refusals are to cost next to nothing: before the prompt is made.
    model.client.check_room(request.n, priority)
    model.vocabulary.check_chars(chars_of(request.messages), model.info.max_context, "messages")
    async with deadline.limit():
        tokens = await model.vocabulary.render(request.messages, request.add_generation_prompt)
    params = sampling_params(
        request,
        model,
        len(tokens),
        param="messages",
        max_tokens=request.max_completion_tokens or request.max_tokens,
        default_max_tokens=None,
        logprobs=request.top_logprobs if request.logprobs else None,
    )
    generation = Generation(
        model,
        service.recorder,
        request,
        f"chatcmpl-{uuid.uuid4().hex}",
        [TokenPrompt(tokens, params)],
        priority,
        http[ACCOUNT],
    )
    return await answer(http, request, generation, _ChatShape(generation, request))


class _ChatShape:
    """The Shape of chat completions."""

    def __init__(self, generation: Generation, request: ChatRequest) -> None:
        self._generation = generation
        self._usage = None if request.include_usage else UNSET
        self._with_logprobs = request.logprobs

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        return [self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])]

    def chunk(self, index: int, text: str, scored: list[Scored] | None) -> msgspec.Struct:
        return self._chunk(
            [ChatChunkChoice(index, ChatDelta(content=text), self._logprobs(scored or []))]
        )

    def closing(self, index: int, finish: Finish) -> msgspec.Struct:
        return self._chunk([ChatChunkChoice(index, ChatDelta(), finish_reason=finish)])

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> msgspec.Struct:
        return ChatCompletion(
            self._generation.id,
            self._generation.created,
            self._generation.model.name,
            self._generation.model.fingerprint,
            [
                ChatChoice(
                    choice.index,
                    ChatMessage(choice.text),
                    self._logprobs(choice.scored),
                    choice.finish,
                )
                for choice in choices
            ],
            usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        generation = self._generation
        return ChatChunk(
            generation.id,
            generation.created,
            generation.model.name,
            generation.model.fingerprint,
            choices,
            self._usage,
        )

    def _logprobs(self, scored: list[Scored]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(scored, self._generation.model.vocabulary)
