"""How far a row is with the thought that goes before its reply."""

from __future__ import annotations

from chairlift.engine.messages import Thinking


class Thought:
    """Follows a row's tokens until its thought has ended, or proves not to have begun."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tokens = 0
        # How many tokens of the end the last ones are.
        self._matched = 0
        self.opening = thinking.start is not None
        self.over = False

    @property
    def start(self) -> int | None:
        """The token that begins a thought, where the next one may."""
        return self._thinking.start if self.opening else None

    @property
    def forced(self) -> int | None:
        """What the next token has to be, once the thought has lasted long enough."""
        budget = self._thinking.budget
        if self.opening or budget is None or self._tokens < budget:
            return None
        return self._thinking.end[self._matched]

    def take(self, token: int) -> bool:
        """Follows one token; whether it is part of the thought."""
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
