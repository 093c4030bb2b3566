"""The ReplyFormatter of /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from chairlift.api.chat.sections import Sections
from chairlift.api.errors import Problem
from chairlift.api.generate.answer import AnsweredChoice
from chairlift.api.http.sse import RESPONSES
from chairlift.api.responses.events import (
    Completed,
    Created,
    ErrorEvent,
    Failed,
    Incomplete,
    InProgress,
    Queued,
)
from chairlift.api.responses.output import OutputWriter
from chairlift.api.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from chairlift.api.schemas.replies import TokenLogprob, Usage
from chairlift.api.text.choice import OutputDelta
from chairlift.api.text.logprobs import Scored, chat_logprobs

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary


class ResponseFormatter:
    """Completes ``response`` delta by delta.

    A stream passes it to ``keep`` before the last event, unless it has failed. If ``vocabulary`` is
    None, the reply has no log-probabilities.
    """

    framing = RESPONSES

    def __init__(
        self, response: Response, vocabulary: Vocabulary | None, keep: Callable[[Response], None]
    ) -> None:
        self._response = response
        self._vocabulary = vocabulary
        self._keep = keep
        self._writer = OutputWriter(response.output, self._logprobs)
        self._sections = Sections(self._writer)

    def queued(self) -> Sequence[msgspec.Struct]:
        """The chunks of a response that is generated in the background, before ``opening``."""
        self._writer.emit(Created(replace(self._response, output=[])))
        self._writer.emit(Queued(replace(self._response, output=[])))
        return self._writer.take()

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        self._response.status = "in_progress"
        if not self._writer.emitted:
            self._writer.emit(Created(replace(self._response, output=[])))
        self._writer.emit(InProgress(replace(self._response, output=[])))
        return self._writer.take()

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        self._sections.add(delta)
        if delta.finish is not None:
            self._finish(cut=delta.finish == "length")
        return self._writer.take()

    def closing(self, usage: Usage) -> Sequence[msgspec.Struct]:
        self._complete(usage)
        self._keep(self._response)
        cut = self._response.status == "incomplete"
        self._writer.emit((Incomplete if cut else Completed)(self._response))
        return self._writer.take()

    def failure(self, problem: Problem) -> Sequence[msgspec.Struct]:
        # Clients expect the event that creates a response before the one that ends it.
        opening = [] if self._writer.emitted else self.opening(0)
        self._response.status = "failed"
        self._response.error = ResponseError("server_error", problem.message)
        self._writer.emit(ErrorEvent(problem.message, problem.code, problem.param))
        self._writer.emit(Failed(self._response))
        return [*opening, *self._writer.take()]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        [choice] = choices
        for delta in choice.deltas:
            self.chunks(delta)
        self._complete(usage)
        return self._response

    def _finish(self, cut: bool) -> None:
        if not self._response.output:
            # Clients expect a message, even an empty one.
            self._writer.text().close(cut)
        self._response.status = "incomplete" if cut else "completed"
        if cut:
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")

    def _complete(self, usage: Usage) -> None:
        if self._response.status == "completed":
            self._response.completed_at = int(time.time())
        self._response.usage = response_usage(usage)

    def _logprobs(self, scored: list[Scored] | None) -> list[TokenLogprob]:
        if self._vocabulary is None or not scored:
            return []
        return chat_logprobs(scored, self._vocabulary).content


def response_usage(usage: Usage) -> ResponseUsage:
    """The usage with the field names of the Responses API."""
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(0 if details is msgspec.UNSET else details.reasoning_tokens),
        usage.total_tokens,
    )
