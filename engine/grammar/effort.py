"""The CPU time of a row's grammar, which may be cheap at first and expensive after some tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

from chairlift.engine.errors import GrammarError

# Limits of a row's CPU time: a base, and more for each token. Most grammars take 0.1 ms a token;
# large schemas take some tens of milliseconds once.
SECONDS = 1.0
SECONDS_PER_TOKEN = 0.005
# If the masks of all rows together take longer than this, one of them is expensive.
SUSPECT_SECONDS = 0.02
# A row that takes less than this, alone, is not the expensive one.
_SLOW_SECONDS = 0.005


class _Measured:
    """Context that adds this thread's CPU time to an effort, for so many tokens or masks.

    NOTE: hundreds are entered in a step; a generator would take four times as long.
    """

    __slots__ = ("_began", "_effort", "_parts")

    def __init__(self, effort: Effort, parts: int) -> None:
        self._effort, self._parts = effort, parts

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        seconds, effort = time.thread_time() - self._began, self._effort
        effort.seconds += seconds
        effort.suspect = effort.suspect or seconds > _SLOW_SECONDS * self._parts


@dataclass(slots=True)
class Effort:
    """The CPU time of one row's grammar.

    Attributes:
        seconds: CPU time so far.
        tokens: tokens that the grammar has consumed.
        suspect: it may be the slow one of a batch, so its next mask is made alone and measured.
    """

    seconds: float = 0.0
    tokens: int = 0
    suspect: bool = False

    def following(self, tokens: int) -> _Measured:
        """Context that measures this thread while the grammar consumes ``tokens`` tokens."""
        self.tokens += tokens
        return _Measured(self, max(1, tokens))

    def alone(self) -> _Measured:
        """Context that measures this thread while it makes one mask, and updates ``suspect``."""
        self.suspect = False
        return _Measured(self, 1)

    def check(self) -> None:
        """Raises GrammarError if the grammar has exceeded its CPU time."""
        if self.seconds > SECONDS + SECONDS_PER_TOKEN * self.tokens:
            raise GrammarError(
                f"the grammar takes too long: {self.seconds:.1f} s for {self.tokens} tokens"
            )
