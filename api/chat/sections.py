"""A choice's pieces as sections: what was thought, text for the user, and each call.

For the doors whose replies are lists of such, each with a beginning and an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.api.text.choice import CallDelta, CallOpening, Piece
from chairlift.api.text.logprobs import Scored


class Section(Protocol):
    """A part of the reply that is being generated."""

    def add(self, text: str, scored: list[Scored] | None) -> None:
        """More of its text, or of a call's arguments; ``scored`` belongs to text for the user."""
        ...

    def close(self, cut: bool) -> None:
        """It is whole, or as much of it as there was room for: ``cut``."""
        ...


class Writer(Protocol):
    """Begins sections; only one at a time is open."""

    def thought(self) -> Section: ...

    def text(self) -> Section: ...

    def call(self, opening: CallOpening) -> Section: ...


class Sections:
    """Gives each of a choice's pieces to the section that it belongs to."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._open: Section | None = None
        self._begun_by: Callable[[], Section] | None = None

    def add(self, piece: Piece) -> None:
        """Takes the next piece; the last one closes the last section."""
        if piece.call is not None:
            self._add_call(piece.call)
        elif piece.thought:
            self._add_text(self._writer.thought, piece)
        elif piece.text or piece.scored:
            self._add_text(self._writer.text, piece)
        if piece.finish is not None:
            self._close(cut=piece.finish == "length")

    def _add_text(self, begin: Callable[[], Section], piece: Piece) -> None:
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
