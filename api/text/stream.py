"""From tokens to the text a client may see: incremental detokenizing and stop strings."""

from __future__ import annotations

from typing import Protocol

from chairlift.api.text.stops import StopMatcher


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
