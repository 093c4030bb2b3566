"""Tracks the thought (reasoning) that precedes a row's reply."""

from __future__ import annotations

from chairlift.engine.messages import Thinking


class Thought:
    """Tracks a row's tokens until its thought has ended, or until the row begins without one.

    Attributes:
        opening: the next token decides whether there is a thought.
        over: the thought has ended, or there is none.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tokens = 0
        # The number of tokens of the end sequence that the last tokens match.
        self._matched = 0
        self.opening = thinking.start is not None
        self.over = False

    @property
    def start(self) -> int | None:
        """The token that begins a thought, if the next token may begin one; else None."""
        return self._thinking.start if self.opening else None

    @property
    def forced(self) -> int | None:
        """The token that must come next because the thought has used up its budget; else None."""
        budget = self._thinking.budget
        if self.opening or budget is None or self._tokens < budget:
            return None
        return self._thinking.end[self._matched]

    def take(self, token: int) -> bool:
        """Takes one token; returns whether it is part of the thought."""
        if self.opening:
            self.opening = False
            self.over = token != self._thinking.start
            return not self.over
        self._tokens += 1
        end = self._thinking.end
        last = (*end[: self._matched], token)
        self._matched = next(
            n for n in range(len(last), -1, -1) if last[len(last) - n :] == end[:n]
        )
        self.over = self._matched == len(end)
        return True
