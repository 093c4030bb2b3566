"""Builds a reply's content blocks and stream events from generated sections."""

from __future__ import annotations

import msgspec

from chairlift.api.anthropic.replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    Event,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from chairlift.api.chat.json_text import is_complete_object, partial_object
from chairlift.api.chat.sections import EventQueue
from chairlift.api.text.choice import CallOpening
from chairlift.api.text.logprobs import Scored

# This server does not sign reasoning, but some clients send it back only if it has a signature.
SIGNATURE = "unsigned"
# The only member of an input that the model has not written as JSON.
MALFORMED = "INVALID_JSON"


class ContentWriter(EventQueue[Event]):
    """Begins content blocks, and appends each to ``content`` when it is complete.

    Unless ``shows_thoughts``, blocks of reasoning have no text.
    """

    def __init__(self, content: list[ContentBlock], shows_thoughts: bool = True) -> None:
        super().__init__()
        self.content = content
        self.shows_thoughts = shows_thoughts

    def thought(self) -> _Thinking:
        """Begins a thinking block."""
        return _Thinking(self)

    def text(self) -> _Text:
        """Begins a text block."""
        return _Text(self)

    def call(self, opening: CallOpening) -> _ToolUse:
        """Begins a tool_use block."""
        return _ToolUse(self, opening)


class _Section:
    """The base of a block that is being generated; ``empty`` is what its stream begins with."""

    def __init__(self, writer: ContentWriter, empty: ContentBlock) -> None:
        self._writer = writer
        self._index = len(writer.content)
        self._texts: list[str] = []
        writer.emit(BlockStart(self._index, empty))

    def _end(self, block: ContentBlock) -> None:
        self._writer.emit(BlockStop(self._index))
        self._writer.content.append(block)


class _Text(_Section):
    def __init__(self, writer: ContentWriter) -> None:
        super().__init__(writer, TextBlock(""))

    def add(self, text: str, scored: list[Scored] | None) -> None:
        self._texts.append(text)
        self._writer.emit(BlockDelta(self._index, TextDelta(text)))

    def close(self, cut: bool) -> None:
        self._end(TextBlock("".join(self._texts)))


class _Thinking(_Section):
    def __init__(self, writer: ContentWriter) -> None:
        super().__init__(writer, ThinkingBlock("", ""))

    def add(self, text: str, scored: list[Scored] | None) -> None:
        if self._writer.shows_thoughts:
            self._texts.append(text)
            self._writer.emit(BlockDelta(self._index, ThinkingDelta(text)))

    def close(self, cut: bool) -> None:
        self._writer.emit(BlockDelta(self._index, SignatureDelta(SIGNATURE)))
        self._end(ThinkingBlock("".join(self._texts), SIGNATURE))


class _ToolUse(_Section):
    def __init__(self, writer: ContentWriter, opening: CallOpening) -> None:
        super().__init__(writer, ToolUseBlock(*opening, msgspec.Raw(b"{}")))
        self._opening = opening

    def add(self, text: str, scored: list[Scored] | None) -> None:
        self._texts.append(text)
        self._writer.emit(BlockDelta(self._index, InputJsonDelta(text)))

    def close(self, cut: bool) -> None:
        self._end(ToolUseBlock(*self._opening, _input_of("".join(self._texts), cut)))


def _input_of(arguments: str, cut: bool) -> msgspec.Raw:
    """The arguments as JSON. If the reply's end has cut them, only their complete part.

    Anthropic's client derives the same from the stream. Malformed arguments of a free call become
    an object that no function takes for valid input, as Anthropic's documentation suggests.
    """
    if is_complete_object(arguments):
        return msgspec.Raw(arguments.encode())
    found = partial_object(arguments)
    if not found and not cut:
        found = {MALFORMED: arguments}
    return msgspec.Raw(msgspec.json.encode(found))
