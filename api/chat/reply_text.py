"""The text of a reply and of its thought, without the white space around tags."""

from __future__ import annotations

from chairlift.api.text.stops import StopMatcher


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


class ReplyText:
    """The text for the user: cut at stop strings, without blank lines around thoughts and calls.

    ``begun`` is False directly after a thought or a call, where blank lines are dropped. With
    ``may_call``, trailing white space is buffered, since a call may follow it.
    """

    def __init__(self, matcher: StopMatcher, begun: bool, may_call: bool) -> None:
        self._matcher = matcher
        self.begun = begun
        self._may_call = may_call
        # Trailing white space, which is dropped if a call follows.
        self._pending = ""
        # White space dropped before the last call or thought.
        self._dropped = ""
        # Characters taken in, and characters returned.
        self.read = 0
        self.sent = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matcher.found

    def add(self, text: str) -> str:
        """Takes more text; returns the text that is certain now."""
        if not self.begun:
            text = text.lstrip("\n")
            self.begun = bool(text)
        self.read += len(text)
        return self._pass_on(self._matcher.feed(text))

    def interrupt(self) -> str:
        """A thought or a call begins; returns the text before it that was buffered."""
        text = self._pass_on(self._matcher.finish())
        self._dropped, self._pending = self._pending, ""
        self.read = self.sent
        self.begun = False
        return text

    def resume(self, text: str) -> str:
        """Undoes ``interrupt``: what seemed to be a call is text after all."""
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
