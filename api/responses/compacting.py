"""POST /v1/responses/compact: the model writes a summary that replaces a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from chairlift.api.errors import GenerationFailed, Problem
from chairlift.api.generate.answer import AnsweredChoice
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import RESPONSES
from chairlift.api.responses.compaction import sealed
from chairlift.api.responses.dialogue import Earlier, conversation_of
from chairlift.api.responses.formatter import response_usage
from chairlift.api.responses.history import messages_of
from chairlift.api.responses.items import CompactionItem, MessageItem, new_id
from chairlift.api.responses.replies import CompactedResponse
from chairlift.api.responses.request import CompactRequest
from chairlift.api.schemas.replies import Usage
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.choice import OutputDelta

# A longer summary would defeat its purpose.
MAX_SUMMARY_TOKENS = 4096
_ASK = (
    "Summarize the conversation so far, for an assistant who will carry on without having seen it. "
    "State the user's goals and constraints, what was done and found (with names, values and file "
    "paths as they are), what was decided, and what is still open. Reply with the summary alone."
)


class Compaction(NamedTuple):
    """``chat`` asks the model for the summary; ``kept`` are the messages that stay unchanged."""

    chat: ChatRequest
    kept: list[MessageItem]


def compaction_of(request: CompactRequest, earlier: Earlier) -> Compaction:
    """Plans the compaction of a conversation; it keeps all messages but the assistant's.

    Raises:
        RequestError, pydantic.ValidationError: the conversation is empty or too long.
    """
    items = conversation_of(request, earlier)
    messages = messages_of(request.instructions, items)
    chat = ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": [*messages, {"role": "user", "content": _ASK}],
            "max_tokens": MAX_SUMMARY_TOKENS,
            "reasoning_effort": "none",
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "timeout": request.timeout,
        }
    )
    kept = [item for item in items if isinstance(item, MessageItem) and item.role != "assistant"]
    return Compaction(chat, kept)


class CompactionFormatter:
    """Replies with the kept messages and the summary as the last item. It is never streamed."""

    framing = RESPONSES

    def __init__(self, kept: Sequence[MessageItem], generation: Generation) -> None:
        self._kept = kept
        self._generation = generation

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        return ()

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        return ()

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return ()

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        return ()

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        [choice] = choices
        summary = choice.text.strip()
        if not summary:
            raise GenerationFailed("the model has written no summary")
        return CompactedResponse(
            self._generation.id,
            self._generation.created,
            [*self._kept, CompactionItem(new_id("cmp"), sealed(summary))],
            response_usage(usage),
        )
