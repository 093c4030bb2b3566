"""Turns output tokens into text for the client: streaming detokenization and stop strings."""

from __future__ import annotations

from typing import Protocol

from chairlift.api.text.stops import StopMatcher


class Detokenizer(Protocol):
    """The interface of mlx-lm's streaming detokenizers that is used here, and two numbers.

    Attributes:
        overdue: the characters between the text before the last token and the token's own.
    """

    overdue: int

    @property
    def waiting(self) -> int:
        """The number of characters that ``finalize`` would add."""
        ...

    @property
    def last_segment(self) -> str:
        """The text completed since this property was last read."""
        ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None:
        """Completes the text that was waiting for more tokens."""
        ...


class StoppableText:
    """A text that ends at its first stop string; the base of the texts that clients get.

    Attributes:
        read: the number of characters taken in.
        sent: the number of characters returned.
    """

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self.read = 0
        self.sent = 0

    def begin_token(self, pending: int) -> None:
        """See ``StopMatcher.begin_token``."""
        self._matcher.begin_token(pending)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matcher.found


class TextStream(StoppableText):
    """The text of one choice, built token by token.

    ``detokenizer`` must be one that continues a text, so that a leading space is kept; see
    ``Vocabulary.detokenizer``. Tokens in ``hidden`` have no text.

    Attributes:
        start: the offset of the last token's own text, in characters.
    """

    def __init__(
        self, detokenizer: Detokenizer, hidden: frozenset[int], matcher: StopMatcher
    ) -> None:
        super().__init__(matcher)
        self._detokenizer = detokenizer
        self._hidden = hidden
        self.start = 0

    @property
    def end(self) -> int:
        """The offset of a token whose text cannot continue that of the last one."""
        return self.read + self._detokenizer.waiting

    def add(self, token: int) -> str:
        """Takes the next token; returns the text that is certain now."""
        self.start = self.read
        if token in self._hidden:
            self.begin_token(0)
            return ""
        self._detokenizer.add_token(token)
        self.start += self._detokenizer.overdue
        self.begin_token(self._detokenizer.overdue)
        piece = self._detokenizer.last_segment
        return self._pass_on(piece) if piece else ""

    def finish(self) -> str:
        """Returns the remaining text at the end of the output; empty after a stop string."""
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
