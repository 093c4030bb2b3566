"""Groups the deltas of a choice into sections: thoughts, texts and calls.

The Messages and Responses APIs reply with lists of such sections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from chairlift.api.text.choice import CallDelta, CallOpening, OutputDelta
from chairlift.api.text.logprobs import Scored

E = TypeVar("E")


class Section(Protocol):
    """A section of the reply that is being generated."""

    def add(self, text: str, scored: list[Scored] | None) -> None:
        """Adds text or a part of a call's arguments. Only text for the user has ``scored``."""
        ...

    def close(self, cut: bool) -> None:
        """Ends the section. If ``cut``, the reply reached its maximum length in it."""
        ...


class Writer(Protocol):
    """Begins sections. Only one section is open at a time."""

    def thought(self) -> Section: ...

    def text(self) -> Section: ...

    def call(self, opening: CallOpening) -> Section: ...


class EventQueue(Generic[E]):
    """A writer's events that the reply's stream has not sent yet."""

    def __init__(self) -> None:
        self._events: list[E] = []

    def emit(self, event: E) -> None:
        """Queues the next event."""
        self._events.append(event)

    def take(self) -> list[E]:
        """Removes and returns the queued events."""
        events, self._events = self._events, []
        return events


class Sections:
    """Passes each delta of a choice to the section that it belongs to."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._open: Section | None = None
        self._begun_by: Callable[[], Section] | None = None

    def add(self, delta: OutputDelta) -> None:
        """Takes the next delta. The choice's last delta closes the last section."""
        if delta.call is not None:
            self._add_call(delta.call)
        elif delta.thought:
            self._add_text(self._writer.thought, delta)
        elif delta.text or delta.scored:
            self._add_text(self._writer.text, delta)
        if delta.finish is not None:
            self._close(cut=delta.finish == "length")

    def _add_text(self, begin: Callable[[], Section], delta: OutputDelta) -> None:
        if self._open is None or self._begun_by != begin:
            self._close()
            self._open, self._begun_by = begin(), begin
        self._open.add(delta.text, delta.scored)

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
