"""Builds a response's output items and stream events from generated sections."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.api.chat.json_text import is_complete_object
from chairlift.api.chat.sections import EventQueue
from chairlift.api.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
)
from chairlift.api.responses.items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    new_id,
)
from chairlift.api.schemas.replies import TokenLogprob
from chairlift.api.text.choice import CallOpening
from chairlift.api.text.logprobs import Scored

Logprobs = Callable[[list[Scored] | None], list[TokenLogprob]]


class OutputWriter(EventQueue[Event]):
    """Begins output items, and appends each to ``output`` when it is complete.

    ``logprobs`` converts scored tokens to log-probabilities for the client. ``emitted`` counts the
    events so far.
    """

    def __init__(self, output: list[OutputItem], logprobs: Logprobs) -> None:
        super().__init__()
        self.output = output
        self.logprobs = logprobs
        self.emitted = 0

    def thought(self) -> _Thought:
        """Begins a reasoning item."""
        return _Thought(self)

    def text(self) -> _Message:
        """Begins a message item."""
        return _Message(self)

    def call(self, opening: CallOpening) -> _Call:
        """Begins a function call item."""
        return _Call(self, opening)

    def emit(self, event: Event) -> None:
        """Numbers the next event and queues it."""
        event.sequence_number = self.emitted
        self.emitted += 1
        super().emit(event)


def _status(cut: bool) -> ItemStatus:
    return "incomplete" if cut else "completed"


class _Section:
    """The base of an item that is being generated."""

    def __init__(self, writer: OutputWriter, prefix: str) -> None:
        self._writer = writer
        self._emit = writer.emit
        self._index = len(writer.output)
        self._id = new_id(prefix)
        self._texts: list[str] = []

    def _end(self, item: OutputItem) -> None:
        self._emit(ItemDone(self._index, item))
        self._writer.output.append(item)


class _Message(_Section):
    def __init__(self, writer: OutputWriter) -> None:
        super().__init__(writer, "msg")
        self._logprobs: list[TokenLogprob] = []
        self._emit(ItemAdded(self._index, MessageItem(self._id, "assistant", [], "in_progress")))
        self._emit(PartAdded(self._index, self._id, 0, OutputText("")))

    def add(self, text: str, scored: list[Scored] | None) -> None:
        logprobs = self._writer.logprobs(scored)
        self._texts.append(text)
        self._logprobs += logprobs
        self._emit(OutputTextDelta(self._index, self._id, 0, text, logprobs))

    def close(self, cut: bool) -> None:
        part = OutputText("".join(self._texts), [], self._logprobs)
        self._emit(OutputTextDone(self._index, self._id, 0, part.text, part.logprobs))
        self._emit(PartDone(self._index, self._id, 0, part))
        self._end(MessageItem(self._id, "assistant", [part], _status(cut)))


class _Thought(_Section):
    def __init__(self, writer: OutputWriter) -> None:
        super().__init__(writer, "rs")
        self._emit(ItemAdded(self._index, ReasoningItem(self._id, [], status="in_progress")))
        self._emit(PartAdded(self._index, self._id, 0, ReasoningText("")))

    def add(self, text: str, scored: list[Scored] | None) -> None:
        self._texts.append(text)
        self._emit(ReasoningDelta(self._index, self._id, 0, text))

    def close(self, cut: bool) -> None:
        part = ReasoningText("".join(self._texts))
        self._emit(ReasoningDone(self._index, self._id, 0, part.text))
        self._emit(PartDone(self._index, self._id, 0, part))
        self._end(ReasoningItem(self._id, [part], status=_status(cut)))


class _Call(_Section):
    def __init__(self, writer: OutputWriter, opening: CallOpening) -> None:
        super().__init__(writer, "fc")
        self._opening = opening
        self._emit(ItemAdded(self._index, self._item("in_progress")))

    def add(self, text: str, scored: list[Scored] | None) -> None:
        self._texts.append(text)
        self._emit(ArgumentsDelta(self._index, self._id, text))

    def close(self, cut: bool) -> None:
        # A free call may be malformed although the model has ended it.
        item = self._item(_status(not is_complete_object("".join(self._texts))))
        self._emit(ArgumentsDone(self._index, self._id, item.name, item.arguments))
        self._end(item)

    def _item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(self._id, *self._opening, "".join(self._texts), status)
