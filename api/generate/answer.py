"""Answers a request that generates: as one reply or as a stream, written by a ReplyFormatter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.errors import Problem, problem_of
from chairlift.api.generate.generation import Generation
from chairlift.api.http.early_stream import event_stream
from chairlift.api.http.sse import EventStream, Framing
from chairlift.api.observe.request_record import GENERATION
from chairlift.api.schemas.replies import Finish, Usage
from chairlift.api.schemas.schemas import GenerationRequest
from chairlift.api.service import SERVICE
from chairlift.api.text.choice import OutputDelta
from chairlift.api.text.logprobs import Scored
from chairlift.engine.logs.redacted_traceback import redacted_traceback

logger = logging.getLogger(__name__)

# Formatting the log-probabilities of more tokens on the event loop would block all streams.
INLINE_SCORED_TOKENS = 1000

T = TypeVar("T")


class FinishedCall(NamedTuple):
    """A function call; ``arguments`` is all of its JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class AnsweredChoice:
    """A finished choice: its index in the reply, and its ``deltas`` in order."""

    index: int
    deltas: list[OutputDelta] = field(default_factory=list)

    @property
    def finish(self) -> Finish:
        """The finish reason."""
        finish = self.deltas[-1].finish
        assert finish is not None, "it is finished"
        return finish

    @property
    def text(self) -> str:
        """The text for the user."""
        return "".join(delta.text for delta in self.deltas if not delta.thought)

    @property
    def reasoning(self) -> str:
        """The model's reasoning, or empty."""
        return "".join(delta.text for delta in self.deltas if delta.thought)

    @property
    def scored(self) -> list[Scored]:
        """The log-probabilities of the text; empty if they were not requested."""
        return [scored for delta in self.deltas for scored in delta.scored or ()]

    @property
    def calls(self) -> list[FinishedCall]:
        """The model's function calls."""
        parts = [delta.call for delta in self.deltas if delta.call is not None]
        return [
            FinishedCall(
                *first.opening, "".join(p.arguments for p in parts if p.number == first.number)
            )
            for first in parts
            if first.opening is not None
        ]


class ReplyFormatter(Protocol):
    """Formats the reply of one endpoint, as a stream's chunks or as one JSON body."""

    @property
    def framing(self) -> Framing:
        """The format of the stream's events."""
        ...

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        """The chunks before the first delta of choice ``index``."""
        ...

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        """The chunks of a delta, including its finish reason."""
        ...

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        """The chunks that end a stream once all choices have finished."""
        ...

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        """The chunks that end a failed stream."""
        ...

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        """The body of the reply to a request that does not stream.

        May be called in a thread.
        """
        ...


async def answer(
    http: web.Request, request: GenerationRequest, generation: Generation, formatter: ReplyFormatter
) -> web.StreamResponse:
    """Generates and sends the reply.

    Raises:
        QueueFull, EngineDead: the engine does not accept the request now.
        RateLimited: the client's key has reached a limit.
        EngineDead, GenerationFailed, TimedOut: generation failed before anything was sent.
        ConnectionResetError: the client left.
    """
    http[GENERATION] = generation
    deadline = http[DEADLINE]
    try:
        with http.app[SERVICE].live.riding(generation):
            generation.submit(deadline.arrival)
            if request.stream:
                return await _stream(http, generation, formatter)
            async with deadline.limit():
                return await _complete_reply(generation, formatter)
    finally:
        generation.close()


async def _complete_reply(generation: Generation, formatter: ReplyFormatter) -> web.Response:
    choices: dict[int, AnsweredChoice] = {}
    async with aclosing(generation.deltas()) as steps:
        async for deltas in steps:
            for delta in deltas:
                choices.setdefault(delta.choice, AnsweredChoice(delta.choice)).deltas.append(delta)
    ordered = [choices[index] for index in sorted(choices)]
    scored = sum(len(delta.scored or ()) for choice in ordered for delta in choice.deltas)
    make = partial(formatter.full_reply, ordered, generation.usage())
    return json_response(await _formatted(generation.echoed_tokens + scored, make))


async def _formatted(scored: int, make: Callable[[], T]) -> T:
    """Calls ``make``; in a thread if it formats the log-probabilities of many tokens."""
    if scored <= INLINE_SCORED_TOKENS:
        return make()
    return await asyncio.to_thread(make)


async def _stream(
    http: web.Request, generation: Generation, formatter: ReplyFormatter
) -> web.StreamResponse:
    settings = http.app[SERVICE].settings

    def is_too_slow() -> bool:
        return generation.waiting > settings.slow_reader_tokens

    stream = event_stream(http, formatter.framing, settings.keep_alive_seconds, is_too_slow)
    async with stream as events:
        try:
            async with http[DEADLINE].limit():
                await _send_deltas(events, generation, formatter)
            if closing := formatter.closing(generation.usage()):
                await events.send(closing)
        except ConnectionResetError:
            raise
        except Exception as error:
            problem = problem_of(error)
            log_failure(problem.status, error)
            await events.send(formatter.failure(problem))
        await events.finish()
    return events.response


async def _send_deltas(
    events: EventStream, generation: Generation, formatter: ReplyFormatter
) -> None:
    opened: set[int] = set()
    async with aclosing(generation.deltas()) as steps:
        async for deltas in steps:
            chunks: list[msgspec.Struct] = []
            for delta in deltas:
                if delta.choice not in opened:
                    opened.add(delta.choice)
                    opening = partial(formatter.opening, delta.choice)
                    chunks += await _formatted(generation.echoed_tokens, opening)
                chunks += formatter.chunks(delta)
            await events.send(chunks)


def json_response(reply: msgspec.Struct) -> web.Response:
    """A 200 with ``reply`` as its body."""
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def log_failure(status: int, error: BaseException) -> None:
    """Logs server errors for the operator: bugs with a traceback, but without any user text."""
    if status == 500:
        logger.error("a request failed: %s", redacted_traceback(error))
    elif status > 501:  # 501 is the client's fault, whose request needs what HTTP leaves optional
        logger.warning("a request was not served: %s", error)
