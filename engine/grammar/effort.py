"""The CPU time of a row's grammar, which may be cheap at first and expensive after some tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def following(self, tokens: int) -> Iterator[None]:
        """Context that measures this thread while the grammar consumes ``tokens`` tokens."""
        self.tokens += tokens
        with self._measured(max(1, tokens)):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context that measures this thread while it makes one mask, and updates ``suspect``."""
        self.suspect = False
        with self._measured(1):
            yield

    @contextmanager
    def _measured(self, parts: int) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - began
            self.seconds += seconds
            self.suspect = self.suspect or seconds > _SLOW_SECONDS * parts

    def check(self) -> None:
        """Raises GrammarError if the grammar has exceeded its CPU time."""
        if self.seconds > SECONDS + SECONDS_PER_TOKEN * self.tokens:
            raise GrammarError(
                f"the grammar takes too long: {self.seconds:.1f} s for {self.tokens} tokens"
            )
