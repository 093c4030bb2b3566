"""The ReplyFormatters of /api/chat and /api/generate."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET

from chairlift.api.chat.json_text import is_complete_object
from chairlift.api.chat.sections import EventQueue, Sections
from chairlift.api.errors import Problem
from chairlift.api.generate.answer import AnsweredChoice
from chairlift.api.generate.generation import Generation
from chairlift.api.http.sse import NDJSON
from chairlift.api.ollama.errors import error_of
from chairlift.api.ollama.replies import (
    OllamaCall,
    OllamaCallFunction,
    OllamaChat,
    OllamaGenerated,
    OllamaReply,
    OllamaReplyMessage,
)
from chairlift.api.schemas.replies import Usage
from chairlift.api.text.choice import CallOpening, OutputDelta
from chairlift.api.text.logprobs import Scored, chat_logprobs


@dataclass(slots=True)
class Part:
    """A part of a reply, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)


class _OllamaFormatter(ABC):
    """Formats the reply of a generation with one choice.

    Args:
        generation: the generation.
        model: the model's name in the request.
        arrival: when the request arrived, in seconds of ``time.monotonic()``.
        with_logprobs: whether the reply has log-probabilities.
    """

    framing = NDJSON

    def __init__(
        self, generation: Generation, model: str, arrival: float, with_logprobs: bool
    ) -> None:
        self._generation = generation
        self._model = model
        self._arrival = arrival
        self._with_logprobs = with_logprobs
        self._writer = _PartWriter()
        self._sections = Sections(self._writer)

    @abstractmethod
    def _reply(self, part: Part) -> OllamaReply:
        """A line of the stream, or the whole reply."""

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        return []

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        return [self._scored_reply(part) for part in self._parts(delta)]

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [self._finished(self._reply(Part()), usage)]

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        return [error_of(problem, self._generation.id)]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        [choice] = choices
        parts = [part for delta in choice.deltas for part in self._parts(delta)]
        whole = Part(
            "".join(part.text for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.calls],
            [scored for part in parts for scored in part.scored],
        )
        return self._finished(self._scored_reply(whole), usage)

    def _parts(self, delta: OutputDelta) -> list[Part]:
        self._sections.add(delta)
        return self._writer.take()

    def _scored_reply(self, part: Part) -> OllamaReply:
        reply = self._reply(part)
        if self._with_logprobs:
            reply.logprobs = chat_logprobs(part.scored, self._generation.model.vocabulary).content
        return reply

    def _finished(self, reply: OllamaReply, usage: Usage) -> OllamaReply:
        times = self._generation.times[0]
        [choice] = self._generation.choices
        reply.done = True
        reply.done_reason = "length" if choice.finish == "length" else "stop"
        reply.total_duration = nanoseconds(time.monotonic() - self._arrival)
        reply.load_duration = 0
        reply.prompt_eval_count = usage.prompt_tokens
        reply.prompt_eval_duration = nanoseconds(times.prefill or 0.0)
        reply.eval_count = usage.completion_tokens
        # Clients divide by it.
        reply.eval_duration = max(1, nanoseconds(times.decode or 0.0))
        return reply


class ChatFormatter(_OllamaFormatter):
    """Formats the reply of /api/chat."""

    def _reply(self, part: Part) -> OllamaChat:
        message = OllamaReplyMessage(part.text, part.thinking or UNSET, part.calls or UNSET)
        return OllamaChat(model=self._model, created_at=now(), message=message)


class GenerateFormatter(_OllamaFormatter):
    """Formats the reply of /api/generate."""

    def _reply(self, part: Part) -> OllamaGenerated:
        return OllamaGenerated(
            model=self._model,
            created_at=now(),
            response=part.text,
            thinking=part.thinking or UNSET,
        )


class _PartWriter(EventQueue[Part]):
    """Collects the parts of a reply; see ``chat.sections.Writer``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def thought(self) -> _TextSection:
        return _TextSection(self, "thinking")

    def text(self) -> _TextSection:
        return _TextSection(self, "text")

    def call(self, opening: CallOpening) -> _CallSection:
        return _CallSection(self, opening)


class _TextSection:
    def __init__(self, writer: _PartWriter, kind: Literal["text", "thinking"]) -> None:
        self._writer = writer
        self._kind = kind

    def add(self, text: str, scored: list[Scored] | None) -> None:
        part = Part(scored=scored or [])
        setattr(part, self._kind, text)
        self._writer.emit(part)

    def close(self, cut: bool) -> None:
        pass


class _CallSection:
    """A call, which is one part once it is complete.

    Clients run every call that they get, whatever the reply's end, so a call that was cut is left
    out, and one with malformed arguments is text.
    """

    def __init__(self, writer: _PartWriter, opening: CallOpening) -> None:
        self._writer = writer
        self._opening = opening
        self._texts: list[str] = []

    def add(self, text: str, scored: list[Scored] | None) -> None:
        self._texts.append(text)

    def close(self, cut: bool) -> None:
        identity, name = self._opening
        arguments = "".join(self._texts)
        if is_complete_object(arguments):
            # White space between the values of an object may break the line.
            raw = msgspec.Raw(arguments.replace("\n", " ").replace("\r", " ").encode())
            function = OllamaCallFunction(self._writer.num_calls, name, raw)
            self._writer.num_calls += 1
            self._writer.emit(Part(calls=[OllamaCall(identity, function)]))
        elif not cut:
            text = f'{{"name": "{name}", "arguments": {arguments}'
            self._writer.emit(Part(text))


def now() -> datetime:
    """The time of a reply."""
    return datetime.now(UTC)


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama reports it."""
    return round(seconds * 1e9)
