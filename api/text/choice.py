"""One choice of a request while it is generated: its text, its log-probabilities, its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from chairlift.api.errors import GenerationFailed
from chairlift.api.schemas.replies import Finish
from chairlift.api.text.logprobs import LogprobQueue, Scored
from chairlift.api.text.stream import TextStream
from chairlift.engine.messages import PromptLogprobs, TokenOutput


class CallDelta(NamedTuple):
    """A part of a call that the model makes.

    ``number`` is the call's place among the choice's calls. ``opening`` tells whose ``arguments``
    follow, in the first delta of each call and only there. All ``arguments`` of a call, one after
    the other, are one JSON text.
    """

    number: int
    opening: CallOpening | None
    arguments: str


class CallOpening(NamedTuple):
    """The id of a call, and the function's name."""

    id: str
    name: str


class Piece(NamedTuple):
    """What one step added to a choice, by its place in the reply, of one kind.

    That is text for the user; or, if ``thought``, what the model thinks; or a part of a ``call``.
    ``scored`` belongs to the text for the user; it is None if not asked for. ``finish`` is set on
    the choice's last piece and only there.
    """

    choice: int
    text: str
    scored: list[Scored] | None
    finish: Finish | None
    thought: bool = False
    call: CallDelta | None = None


class Choice(ABC):
    """Takes a choice's outputs in order; ``index`` is its place in the reply.

    ``tokens`` counts its output, ``reasoning_tokens`` those of it that were thought,
    ``cached_tokens`` what its prompt took from the prefix cache.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish: Finish | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return None

    @abstractmethod
    def take(self, output: TokenOutput) -> list[Piece]:
        """What ``output`` adds, in order; nothing if there is nothing to tell the client.

        Raises:
            GenerationFailed: the engine gave the choice up.
        """

    @staticmethod
    def finish_of(output: TokenOutput, stopped: bool) -> Finish | None:
        """How it ends with ``output``, None if it does not; ``stopped``: its text did."""
        if stopped:
            return "stop"
        if output.finish is None or output.finish == "stop" or output.finish == "length":
            return output.finish
        raise GenerationFailed(output.error or "the engine ended this request")


class VectorChoice(Choice):
    """No text, but what its prompt's hidden states come to: float32 as it lies in memory."""

    vector = b""
    stop_string = None

    def take(self, output: TokenOutput) -> list[Piece]:
        self.cached_tokens = output.cached_tokens
        self.vector = output.embedding or b""
        self.finish = self.finish_of(output, stopped=False)
        return [Piece(self.index, "", None, self.finish)]


class TextChoice(Choice):
    """A choice that is text and nothing else.

    ``prompt_logprobs`` are its prompt's, if it is ``echoed`` with them: from the first piece on.
    The token that ends the text is told then, too: who wants the prompt's leaves out the last.
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

    def take(self, output: TokenOutput) -> list[Piece]:
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        text = self._add_tokens(output)
        if output.finish is not None:
            text += self._text.finish()
        self.finish = self.finish_of(output, self._text.stopped)
        scored = self._scored()
        if not (text or scored or self.finish):
            return []
        return [Piece(self.index, text, scored, self.finish)]

    def _add_tokens(self, output: TokenOutput) -> str:
        text = ""
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.tokens += 1
            start = self._text.read
            ends = output.ended_by_token and position == last
            if ends and not self._echoed:
                break  # it is counted, but has no text
            text += "" if ends else self._text.add(token)
            if self._queue is not None and output.logprobs is not None:
                self._queue.add(Scored(token, output.logprobs[position], start))
            if self._text.stopped:
                break
        return text

    def _scored(self) -> list[Scored] | None:
        if self._queue is None:
            return None
        if self.finish is not None and not self._text.stopped:
            return self._queue.take_rest()
        return self._queue.take(self._text.sent)
