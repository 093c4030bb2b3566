"""One choice of a request while it is generated: its text, its log-probabilities, its end."""

from __future__ import annotations

from typing import NamedTuple

from chairlift.api.errors import GenerationFailed
from chairlift.api.logprobs import LogprobQueue, Scored
from chairlift.api.replies import Finish
from chairlift.api.text import TextStream
from chairlift.engine.messages import TokenOutput


class Piece(NamedTuple):
    """What one step added to a choice, by its place in the reply.

    ``scored`` belongs to ``text``; it is None if not asked for.
    """

    choice: int
    text: str
    scored: list[Scored] | None
    finish: Finish | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the client."""
        return not (self.text or self.scored or self.finish)


class Choice:
    """Takes a choice's outputs in order; ``index`` is its place in the reply.

    ``tokens`` counts its output, ``cached_tokens`` what its prompt took from the prefix cache.
    """

    def __init__(self, index: int, text: TextStream, with_logprobs: bool) -> None:
        self.index = index
        self.tokens = 0
        self.cached_tokens = 0
        self.finish: Finish | None = None
        self._text = text
        self._queue = LogprobQueue() if with_logprobs else None

    def take(self, output: TokenOutput) -> Piece:
        """What ``output`` adds.

        Raises:
            GenerationFailed: the engine gave the choice up.
        """
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        text = self._add_tokens(output)
        if output.finish is not None:
            text += self._text.finish()
        if self._text.stopped:
            self.finish = "stop"
        elif output.finish == "stop" or output.finish == "length":
            self.finish = output.finish
        elif output.finish is not None:
            raise GenerationFailed(output.error or "the engine ended this request")
        return Piece(self.index, text, self._scored(), self.finish)

    def _add_tokens(self, output: TokenOutput) -> str:
        text = ""
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.tokens += 1
            if output.ended_by_token and position == last:
                break  # it is counted, but has no text
            start = self._text.read
            text += self._text.add(token)
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
