"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET

from chairlift.api.chat.prepare import prepare
from chairlift.api.generate.answer import AnsweredChoice, answer
from chairlift.api.generate.body import read
from chairlift.api.generate.generation import Generation
from chairlift.api.openai.formatter import ChunkFormatter
from chairlift.api.schemas.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCallDelta,
    FunctionCallReply,
    ToolCallDelta,
    ToolCallReply,
    Usage,
)
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.choice import CallDelta, OutputDelta
from chairlift.api.text.logprobs import Scored, chat_logprobs


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    request = await read(http, ChatRequest)
    generation = await prepare(http, request, "chatcmpl-")
    return await answer(http, request, generation, _ChatFormatter(generation, request))


class _ChatFormatter(ChunkFormatter[ChatChunkChoice]):
    """The ReplyFormatter of chat completions."""

    def __init__(self, generation: Generation, request: ChatRequest) -> None:
        super().__init__(generation, request)
        self._with_logprobs = request.logprobs

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        return [self._chunk([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])]

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        index, text, scored, finish, thought, call = delta
        chunks = []
        if call is not None:
            chunks.append(ChatChunkChoice(index, ChatDelta(tool_calls=[_call_delta(call)])))
        elif thought:
            chunks.append(ChatChunkChoice(index, ChatDelta(reasoning_content=text)))
        elif text or scored:
            logprobs = self._logprobs(scored or [])
            chunks.append(ChatChunkChoice(index, ChatDelta(content=text), logprobs))
        if finish is not None:
            chunks.append(ChatChunkChoice(index, ChatDelta(), finish_reason=finish))
        return [self._chunk([chunk]) for chunk in chunks]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        return ChatCompletion(
            self._generation.id,
            self._generation.created,
            self._generation.model.name,
            self._generation.model.fingerprint,
            [
                ChatChoice(
                    choice.index, _message(choice), self._logprobs(choice.scored), choice.finish
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
            self._chunk_usage(),
        )

    def _logprobs(self, scored: list[Scored]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(scored, self._generation.model.vocabulary)


def _message(choice: AnsweredChoice) -> ChatMessage:
    calls = [
        ToolCallReply(call.id, FunctionCallReply(call.name, call.arguments))
        for call in choice.calls
    ]
    return ChatMessage(
        choice.text or (None if calls else ""),
        choice.reasoning or UNSET,
        calls or UNSET,
    )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.opening is None:
        return ToolCallDelta(call.number, FunctionCallDelta(call.arguments))
    identity, name = call.opening
    function = FunctionCallDelta(call.arguments, name)
    return ToolCallDelta(call.number, function, identity, "function")
