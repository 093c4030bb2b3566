"""Reasoning and text of a reply, without the white space around tags."""

from __future__ import annotations

from chairlift.api.text.stops import StopMatcher
from chairlift.api.text.stream import StoppableText


class ThoughtText:
    """Strips the white space around a thought that arrives in pieces."""

    def __init__(self) -> None:
        self._begun = False
        # Trailing white space, which is dropped unless more text follows.
        self._pending = ""

    def add(self, text: str) -> str:
        """Takes more text; returns the text that is certain now."""
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        text = self._pending + text
        shown = text.rstrip()
        self._pending = text[len(shown) :]
        return shown


class ReplyText(StoppableText):
    """The text for the user: cut at stop strings, without blank lines around thoughts and calls.

    ``begun`` is False directly after a thought or a call, where blank lines are dropped. With
    ``may_call``, trailing white space is buffered, since a call may follow it.
    """

    def __init__(self, matcher: StopMatcher, begun: bool, may_call: bool) -> None:
        super().__init__(matcher)
        self.begun = begun
        self._may_call = may_call
        # Trailing white space, which is dropped if a call follows.
        self._pending = ""
        # White space dropped before the last call or thought.
        self._dropped = ""

    def add(self, text: str) -> str:
        """Takes more text; returns the text that is certain now."""
        if not self.begun:
            text = text.lstrip("\n")
            self.begun = bool(text)
        self.read += len(text)
        return self._pass_on(self._matcher.feed(text))

    def interrupt(self) -> str:
        """Returns the buffered text, because a thought or a call begins."""
        text = self._pass_on(self._matcher.finish())
        self._dropped, self._pending = self._pending, ""
        self.read = self.sent
        self.begun = False
        return text

    def resume(self, text: str) -> str:
        """Undoes ``interrupt``, because the supposed call is text; returns the text certain now."""
        text, self._dropped = self._dropped + text, ""
        self.begun = True
        return self.add(text)

    def finish(self) -> str:
        """Returns the remaining text at the end of the output."""
        self._may_call = False
        return self._pass_on(self._matcher.finish())

    def _pass_on(self, text: str) -> str:
        text = self._pending + text
        shown = text.rstrip() if self._may_call else text
        self._pending = text[len(shown) :]
        self.sent += len(shown)
        return shown
