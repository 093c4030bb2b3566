"""What a row's grammar costs: a grammar can be cheap at first and hard after a few tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chairlift.engine.errors import GrammarError

# CPU time that a row's grammar may take: at once, and more for each token. Most take a tenth of a
# millisecond a token, and those of large schemas some tens once.
SECONDS = 1.0
SECONDS_PER_TOKEN = 0.005
# The masks of all rows together take far less, unless one of them is hard.
SUSPECT_SECONDS = 0.02
# A row that takes less is one of the others.
_SLOW_SECONDS = 0.005


@dataclass(slots=True)
class Effort:
    """The CPU time that one row's grammar has taken, and the tokens that it has followed.

    ``suspect``: it may be the one that takes long, and is measured alone.
    """

    seconds: float = 0.0
    tokens: int = 0
    suspect: bool = False

    @contextmanager
    def following(self, tokens: int) -> Iterator[None]:
        """Counts what this thread does in it, which is to follow so many tokens."""
        self.tokens += tokens
        with self._measured(max(1, tokens)):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Counts what this thread does in it, which is one mask; it decides on the suspicion."""
        self.suspect = False
        with self._measured(1):
            yield

    @contextmanager
    def _measured(self, parts: int) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            taken = time.thread_time() - began
            self.seconds += taken
            self.suspect = self.suspect or taken > _SLOW_SECONDS * parts

    def check(self) -> None:
        """Raises GrammarError if it has taken more than it may."""
        if self.seconds > SECONDS + SECONDS_PER_TOKEN * self.tokens:
            raise GrammarError(
                f"the grammar takes too long: {self.seconds:.1f} s for {self.tokens} tokens"
            )
