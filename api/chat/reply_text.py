"""The text of a reply and of the thought before it, without the blank space between them."""

from __future__ import annotations

from chairlift.api.text.stops import StopMatcher


class ThoughtText:
    """A thought that arrives in pieces; blank space that ends it is left out."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def add(self, text: str) -> str:
        """Takes more text; returns what is certain now."""
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


class ReplyText:
    """The text for the user, cut at stop strings, without the lines around thoughts and calls.

    ``begun``: blank lines are its own from here on, and do not follow a thought or a call.
    ``may_call``: a call may follow, so that blank space is held back while nothing follows it.
    """

    def __init__(self, matcher: StopMatcher, begun: bool, may_call: bool) -> None:
        self._matcher = matcher
        self.begun = begun
        self._may_call = may_call
        self._held = ""
        # Blank space before the last call or thought.
        self._left_out = ""
        # Characters taken, and given out.
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

    def add(self, text: str) -> str:
        """Takes more text; returns what is certain now."""
        if not self.begun:
            text = text.lstrip("\n")
            self.begun = bool(text)
        self.read += len(text)
        return self._pass_on(self._matcher.feed(text))

    def interrupt(self) -> str:
        """Something else begins; returns the text before it that was held back."""
        text = self._pass_on(self._matcher.finish())
        self._left_out, self._held = self._held, ""
        self.read = self.sent
        self.begun = False
        return text

    def go_on(self, text: str) -> str:
        """What seemed to interrupt it is text after all."""
        text, self._left_out = self._left_out + text, ""
        self.begun = True
        return self.add(text)

    def finish(self) -> str:
        """The rest, when nothing more comes."""
        self._may_call = False
        return self._pass_on(self._matcher.finish())

    def _pass_on(self, text: str) -> str:
        text = self._held + text
        shown = text.rstrip() if self._may_call else text
        self._held = text[len(shown) :]
        self.sent += len(shown)
        return shown
