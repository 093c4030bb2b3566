"""Groups the pieces of a choice into sections: each thought, text or call with a begin and an end.

The Messages and Responses APIs reply with lists of such sections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.api.text.choice import CallDelta, CallOpening, OutputDelta
from chairlift.api.text.logprobs import Scored


class Section(Protocol):
    """A section of the reply while it is generated."""

    def add(self, text: str, scored: list[Scored] | None) -> None:
        """Adds text, or a part of a call's arguments. ``scored`` comes with text for the user."""
        ...

    def close(self, cut: bool) -> None:
        """Ends the section. ``cut`` means that the reply reached its maximum length in it."""
        ...


class Writer(Protocol):
    """Begins sections. Only one section is open at a time."""

    def thought(self) -> Section: ...

    def text(self) -> Section: ...

    def call(self, opening: CallOpening) -> Section: ...


class Sections:
    """Passes each piece of a choice to the section that it belongs to."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._open: Section | None = None
        self._begun_by: Callable[[], Section] | None = None

    def add(self, piece: OutputDelta) -> None:
        """Takes the next piece. The choice's last piece closes the last section."""
        if piece.call is not None:
            self._add_call(piece.call)
        elif piece.thought:
            self._add_text(self._writer.thought, piece)
        elif piece.text or piece.scored:
            self._add_text(self._writer.text, piece)
        if piece.finish is not None:
            self._close(cut=piece.finish == "length")

    def _add_text(self, begin: Callable[[], Section], piece: OutputDelta) -> None:
        if self._open is None or self._begun_by != begin:
            self._close()
            self._open, self._begun_by = begin(), begin
        self._open.add(piece.text, piece.scored)

    def _add_call(self, call: CallDelta) -> None:
        if call.opening is not None:
            self._close()
            self._open = self._writer.call(call.opening)
        assert self._open is not None
        if call.arguments:
            self._open.add(call.arguments, None)

    def _close(self, cut: bool = False) -> None:
        if self._open is not None:
            self._open.close(cut)
        self._open = self._begun_by = None
