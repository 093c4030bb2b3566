"""From tokens to the text a client may see: incremental detokenizing and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizers, as far as they are used here."""

    @property
    def last_segment(self) -> str:
        """The text that has become readable since this was last read."""
        ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None:
        """Makes readable what waited for more tokens."""
        ...


class StopMatcher:
    """Cuts a text that arrives in pieces before the first stop string in it.

    The first is the one that begins first, however the text is cut into pieces; of two that begin
    together, the shorter. Text that may still turn out to be part of it is held back. ``found`` is
    the string itself, once it was.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def feed(self, piece: str) -> str:
        """Takes the next piece; returns the text that is now certain. None follows a stop."""
        if not self._stops:
            return piece
        text = self._held + piece
        found, end = self._first_match(text)
        pending = self._first_pending(text)
        if found is not None and found <= pending:
            self.found = text[found:end]
            self._held = ""
            return text[: end if self._include else found]
        self._held = text[pending:]
        return text[:pending]

    def finish(self) -> str:
        """The rest, when no more pieces come."""
        text, self._held = self._held, ""
        # A stop string may lie in what was held for one that would have begun before it.
        found, end = self._first_match(text)
        if found is None:
            return text
        self.found = text[found:end]
        return text[: end if self._include else found]

    def _first_match(self, text: str) -> tuple[int | None, int]:
        """Where the first whole stop string begins (None: nowhere) and ends."""
        first: int | None = None
        end = 0
        for stop in self._stops:  # shortest first, so that it wins where two begin together
            at = text.find(stop) if first is None else text.find(stop, 0, first + len(stop))
            if at >= 0 and (first is None or at < first):
                first, end = at, at + len(stop)
        return first, end

    def _first_pending(self, text: str) -> int:
        """Where the longest suffix that could still become a stop string begins."""
        size = len(text)
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, size), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return size - longest


class TextStream:
    """The text of one choice, growing token by token.

    ``detokenizer`` must be set up to go on from a text, so that a leading space is kept (see
    ``Vocabulary.detokenizer``). Tokens in ``hidden`` have no text.
    """

    def __init__(
        self, detokenizer: Detokenizer, hidden: frozenset[int], matcher: StopMatcher
    ) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._matcher = matcher
        # Characters detokenized, and characters given out.
        self.read = 0
        self.sent = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.found

    def add(self, token: int) -> str:
        """Takes the next token; returns the text that is now certain."""
        if token in self._hidden:
            return ""
        self._detokenizer.add_token(token)
        piece = self._detokenizer.last_segment
        return self._pass_on(piece) if piece else ""

    def finish(self) -> str:
        """The rest of the text, when no more tokens come. Empty after a stop string."""
        if self.stopped:
            return ""
        self._detokenizer.finalize()
        text = self._pass_on(self._detokenizer.last_segment)
        if not self.stopped:
            rest = self._matcher.finish()
            self.sent += len(rest)
            text += rest
        return text

    def _pass_on(self, piece: str) -> str:
        self.read += len(piece)
        text = self._matcher.feed(piece)
        self.sent += len(text)
        return text
