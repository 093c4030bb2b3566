"""The ReplyFormatter of /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chairlift.api.anthropic.errors import error_of
from chairlift.api.anthropic.output import ContentWriter
from chairlift.api.anthropic.replies import (
    AnthropicMessage,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopDelta,
    StopReason,
)
from chairlift.api.chat.sections import Sections
from chairlift.api.errors import Problem
from chairlift.api.generate.answer import AnsweredChoice
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import MESSAGES
from chairlift.api.schemas.replies import Finish, Usage
from chairlift.api.text.choice import OutputDelta


class MessageFormatter:
    """Formats the reply of a generation with one choice.

    Args:
        generation: the generation.
        max_tokens: the client's limit, which may exceed the context.
        request_id: the request's id, for errors.
        shows_thoughts: whether the reply contains the text of reasoning.
    """

    framing = MESSAGES

    def __init__(
        self, generation: Generation, max_tokens: int, request_id: str, shows_thoughts: bool
    ) -> None:
        self._generation = generation
        self._request_id = request_id
        self._limited_by_context = generation.prompts[0].params.max_tokens < max_tokens
        self._message = AnthropicMessage(
            generation.id, generation.model.name, [], _usage(generation.usage())
        )
        self._writer = ContentWriter(self._message.content, shows_thoughts)
        self._sections = Sections(self._writer)

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        # The number of cached prompt tokens is known once the first output has arrived.
        usage = _usage(self._generation.usage())
        self._writer.emit(
            MessageStart(msgspec.structs.replace(self._message, content=[], usage=usage))
        )
        return self._writer.take()

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        self._sections.add(delta)
        if delta.finish is not None:
            self._message.stop_sequence = self._generation.choices[0].stop_string
            self._message.stop_reason = self._stop_reason(delta.finish)
        return self._writer.take()

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        message = self._message
        assert message.stop_reason is not None
        stop = StopDelta(message.stop_reason, message.stop_sequence)
        self._writer.emit(MessageDelta(stop, _usage(usage)))
        self._writer.emit(MessageStop())
        return self._writer.take()

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        return [error_of(problem, self._request_id)]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        [choice] = choices
        for delta in choice.deltas:
            self.chunks(delta)
        self._message.usage = _usage(usage)
        return self._message

    def _stop_reason(self, finish: Finish) -> StopReason:
        if finish == "length":
            return "model_context_window_exceeded" if self._limited_by_context else "max_tokens"
        if self._message.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if finish == "tool_calls" else "end_turn"


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
