"""Writes the arguments of a native call as JSON while the model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from chairlift.api.chat.call_items import ItemSplitter
from chairlift.api.chat.json_text import ObjectText

# Converts the text of one argument to its name and value. It may raise anything.
ItemParser = Callable[[str], Mapping[str, Any]]

# A longer argument is passed on as the model wrote it.
MAX_ITEM_CHARS = 1 << 17


class ArgumentText(Protocol):
    """The JSON text of one call's arguments.

    Attributes:
        ended: whether the arguments are complete.
        rest: the text after the complete arguments.
        in_string: whether the text so far ends inside a value, in which a tag is only text.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def rest(self) -> str: ...

    @property
    def in_string(self) -> bool: ...

    def add(self, text: str) -> str:
        """Takes more text; returns the JSON text that is certain now."""
        ...

    def finish(self) -> str:
        """Returns the remaining text, because the model has ended the call."""
        ...


class JsonArguments:
    """Arguments that the model writes as a JSON object; they are passed on as they are."""

    def __init__(self) -> None:
        self.rest = ""
        self._object = ObjectText()

    @property
    def ended(self) -> bool:
        return self._object.ended

    @property
    def in_string(self) -> bool:
        return self._object.in_string and not self._object.has_line_break

    def add(self, text: str) -> str:
        written = self._object.add(text)
        self.rest = text[len(written) :]
        return written

    def finish(self) -> str:
        return ""


class ConvertedArguments:
    """Arguments in another notation than JSON, each converted when it is complete.

    If one cannot be converted, or the call ends without its closing, the rest of the call is passed
    on as the model wrote it, so that nothing is lost. The text is no JSON then.

    Args:
        items: splits the text.
        parse: converts one argument.
        needs_end: whether ``items`` finds the end of the call; else the tag after it is the end.
    """

    def __init__(self, items: ItemSplitter, parse: ItemParser, needs_end: bool) -> None:
        self.rest = ""
        self.ended = False
        self._items = items
        self._parse = parse
        self._needs_end = needs_end
        self._is_broken = False
        # The opening brace, until the first piece has it.
        self._separator = "{"
        self._is_empty = True

    @property
    def in_string(self) -> bool:
        return not self._is_broken and self._items.in_value

    def add(self, text: str) -> str:
        if self._is_broken:
            return text
        self._items.text += text
        return "".join(self._pieces())

    def finish(self) -> str:
        if self._is_broken:
            return ""
        if self._needs_end or self._items.in_value:
            return self._break(self._items.text)
        self.ended = True
        return "}"

    def _pieces(self) -> Iterable[str]:
        # A call that is cut after its name has the beginning of an object as its arguments.
        yield self._separator
        self._separator = ""
        while (item := self._items.next_item()) is not None:
            # NOTE: parsers can raise or return anything, because the text comes from a model.
            try:
                ((name, value),) = self._parse(item).items()
                encoded = f"{encode(name)}: {encode(value)}"
            except Exception:
                yield self._break(self._items.written + self._items.text)
                return
            yield encoded if self._is_empty else f", {encoded}"
            self._is_empty = False
        if self._items.ended:
            self.ended, self.rest = True, self._items.text
            yield "}"
        elif len(self._items.text) > MAX_ITEM_CHARS:
            yield self._break(self._items.text)

    def _break(self, text: str) -> str:
        self._is_broken = True
        return text if self._is_empty or not text.strip() else f", {text}"


def encode(value: Any) -> str:
    """The JSON text of a value.

    Raises:
        ValueError, TypeError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= char <= "\udfff" for char in text):  # UTF-8 has no lone surrogates
        return json.dumps(value, allow_nan=False)
    return text
