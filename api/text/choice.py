"""One choice of a request while it is generated: turns engine outputs into deltas of the reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from chairlift.api.errors import GenerationFailed
from chairlift.api.schemas.replies import Finish
from chairlift.api.text.logprobs import LogprobQueue, Scored
from chairlift.api.text.stream import TextStream
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import PromptLogprobs, TokenOutput


class CallDelta(NamedTuple):
    """A part of a tool call.

    Attributes:
        number: the index of the call among the choice's calls.
        opening: set in the first delta of a call and only there.
        arguments: the next part of the call's arguments; all parts together are one JSON text.
    """

    number: int
    opening: CallOpening | None
    arguments: str


class CallOpening(NamedTuple):
    """The id of a call and the name of its function."""

    id: str
    name: str


class OutputDelta(NamedTuple):
    """New output of one choice: text for the user, reasoning text or a part of a call.

    Attributes:
        choice: the choice's index in the reply.
        text: text for the user, or reasoning if ``thought`` is True.
        scored: the log-probabilities of text for the user; None if they were not requested.
        finish: the finish reason, on the choice's last delta and only there.
        thought: whether ``text`` is reasoning.
        call: a part of a call, or None.
    """

    choice: int
    text: str
    scored: list[Scored] | None
    finish: Finish | None
    thought: bool = False
    call: CallDelta | None = None


class Choice(ABC):
    """Takes the engine's outputs for one choice, in order.

    Attributes:
        index: the choice's index in the reply.
        tokens: the number of output tokens.
        reasoning_tokens: the number of output tokens inside thoughts.
        cached_tokens: the number of prompt tokens that came from the prefix cache.
        accepted: those of ``tokens`` that were proposed before they were computed.
        rejected: other proposed tokens.
        finish: the finish reason, or None while the choice is generated.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.accepted = 0
        self.rejected = 0
        self.finish: Finish | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, or None."""
        return None

    @abstractmethod
    def take(self, output: TokenOutput) -> list[OutputDelta]:
        """Returns the deltas that ``output`` adds, in order; perhaps none.

        Raises:
            GenerationFailed: the engine ended the choice with an error.
        """

    def count_drafts(self, output: TokenOutput, taken: int) -> None:
        """Counts proposed tokens; accepted are only those of the first ``taken`` of ``output``."""
        accepted = min(output.accepted, taken)
        self.accepted += accepted
        self.rejected += output.accepted + output.rejected - accepted

    @staticmethod
    def finish_of(output: TokenOutput, stopped: bool) -> Finish | None:
        """The finish reason after ``output``, or None; ``stopped``: a stop string was found.

        Raises:
            GenerationFailed: the engine ended the choice with an error.
            RequestError: the error lies in the request, such as a grammar that leads nowhere.
        """
        if stopped:
            return "stop"
        if output.finish is None or output.finish == "stop" or output.finish == "length":
            return output.finish
        error = output.error or "the engine ended this request"
        raise RequestError(error) if output.client_error else GenerationFailed(error)


class VectorChoice(Choice):
    """A choice without text: ``vector`` is the prompt's embedding, as float32 bytes."""

    vector = b""
    stop_string = None

    def take(self, output: TokenOutput) -> list[OutputDelta]:
        self.cached_tokens = output.cached_tokens
        self.vector = output.embedding or b""
        self.finish = self.finish_of(output, stopped=False)
        return [OutputDelta(self.index, "", None, self.finish)]


class TextChoice(Choice):
    """A choice that is text only.

    If ``echoed``, the reply repeats the prompt: ``prompt_logprobs`` is set from the first delta on,
    and the token that ends the text gets a log-probability, too. A caller that needs only those of
    the prompt drops it.
    """

    def __init__(
        self, index: int, text: TextStream, with_logprobs: bool, echoed: bool = False
    ) -> None:
        super().__init__(index)
        self.prompt_logprobs: PromptLogprobs | None = None
        self._text = text
        self._queue = LogprobQueue() if with_logprobs else None
        self._echoed = echoed

    @property
    def stop_string(self) -> str | None:
        return self._text.stop_string

    def take(self, output: TokenOutput) -> list[OutputDelta]:
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        text = self._add_tokens(output)
        if output.finish is not None:
            text += self._text.finish()
        if output.finish is not None or self._text.stopped:
            self.finish = self.finish_of(output, self._text.stopped)
        scored = None if self._queue is None else self._scored(self._queue)
        if not (text or scored or self.finish):
            return []
        return [OutputDelta(self.index, text, scored, self.finish)]

    def _add_tokens(self, output: TokenOutput) -> str:
        text = ""
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.tokens += 1
            ends = output.ended_by_token and position == last
            if ends and not self._echoed:
                break  # an end token counts as output but has no text
            text += "" if ends else self._text.add(token)
            start = self._text.end if ends else self._text.start
            if self._queue is not None and output.logprobs is not None:
                self._queue.add(Scored(token, output.logprobs[position], start))
            if self._text.stopped:
                break
        return text

    def _scored(self, queue: LogprobQueue) -> list[Scored]:
        if self.finish is not None and not self._text.stopped:
            return queue.take_rest()
        return queue.take(self._text.sent)
