"""Splits the arguments of a call into single arguments while they arrive, and converts each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chairlift.api.chat.call_forms import CallForm, Delimited, Listed
from chairlift.api.text.alarm import TimeUp, within
from chairlift.api.text.chat_format import ToolParser

_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class ItemSplitter(Protocol):
    """Splits the text after a call's head.

    Attributes:
        text: the text that belongs to no complete argument yet; after the call's end, the text
            that follows it.
        written: the last argument and its separator, as the model wrote them.
        ended: whether the end of the call was found.
        in_value: whether ``text`` ends inside a value, in which a tag is only text.
    """

    text: str
    written: str
    ended: bool

    @property
    def in_value(self) -> bool: ...

    def next_item(self) -> str | None:
        """Removes and returns the text of the next complete argument; None if there is none."""
        ...


class DelimitedItems:
    """Splits arguments between tags, like ``<parameter=a>1</parameter>``."""

    def __init__(self, syntax: Delimited) -> None:
        self.text = self.written = ""
        self.ended = False
        self._syntax = syntax
        # The index in ``text`` at which the search for the closing tag continues; None outside of
        # arguments.
        self._searched: int | None = None

    @property
    def in_value(self) -> bool:
        return self._searched is not None

    def next_item(self) -> str | None:
        opens, close, end = self._syntax
        if self._searched is None:
            opening = opens.search(self.text)
            ending = self.text.find(end) if end else -1
            if ending >= 0 and (opening is None or ending < opening.start()):
                self.text = self.text[ending + len(end) :]
                self.ended = True
                return None
            if opening is None:
                return None
            # Text between arguments is dropped, as mlx-lm's parsers do.
            self.text = self.text[opening.start() :]
            self._searched = opening.end() - opening.start()
        found = self.text.find(close, self._searched)
        if found < 0:
            self._searched = max(self._searched, len(self.text) - len(close) + 1)
            return None
        stop = found + len(close)
        self.written, self.text, self._searched = self.text[:stop], self.text[stop:], None
        return self.written


class ListedItems:
    """Splits arguments between commas, like ``a=1, b=[2, 3]``."""

    def __init__(self, syntax: Listed) -> None:
        self.text = self.written = ""
        self.ended = False
        self._syntax = syntax
        self._read = 0
        self._quote = ""
        self._closings: list[str] = []

    @property
    def in_value(self) -> bool:
        # A mark that has not been read may be the first of three.
        return bool(self._quote) or self.text[self._read :] in self._syntax.quotes

    def next_item(self) -> str | None:
        end = self._syntax.end
        while not self.ended and self._read < len(self.text):
            char = self.text[self._read]
            if not self._closings and not self._quote and char in ("," + end):
                size = self._read + 1
                self.written, self.text = self.text[:size], self.text[size:]
                self._read, self.ended = 0, char == end
                if item := self.written[:-1].strip():
                    return item
            elif not self._advance():
                break
        return None

    def _advance(self) -> bool:
        """Reads the next character or quotation mark; False if it may be incomplete."""
        char = self.text[self._read]
        step = 1
        if self._quote and self._syntax.escapes and char == "\\":
            step = 2
        elif self._quote:
            if self.text.startswith(self._quote, self._read):
                step, self._quote = len(self._quote), ""
            elif self._may_begin(self._quote):
                return False
        elif any(map(self._may_begin, self._syntax.quotes)):
            return False
        elif quote := self._quote_here():
            step, self._quote = len(quote), quote
        elif char in _BRACKETS:
            self._closings.append(_BRACKETS[char])
        elif self._closings and char == self._closings[-1]:
            self._closings.pop()
        if self._read + step > len(self.text):
            return False
        self._read += step
        return True

    def _quote_here(self) -> str:
        marks = self._syntax.quotes
        return next((mark for mark in marks if self.text.startswith(mark, self._read)), "")

    def _may_begin(self, mark: str) -> bool:
        """Whether the text ends with an incomplete ``mark`` that begins at this place."""
        rest = self.text[self._read :] if len(self.text) - self._read < len(mark) else ""
        return bool(rest) and mark.startswith(rest)


def splitter(syntax: Delimited | Listed) -> ItemSplitter:
    """A splitter of the arguments of one call."""
    return DelimitedItems(syntax) if isinstance(syntax, Delimited) else ListedItems(syntax)


class ItemConverter:
    """Converts one argument to its name and value, with mlx-lm's parser.

    Args:
        parse: mlx-lm's parser.
        form: how calls are written.
        head: the text of the call before its arguments.
        tools: the request's tools in OpenAI's format.
        seconds: the maximum CPU time for all arguments of the call.
    """

    def __init__(
        self,
        parse: ToolParser,
        form: CallForm,
        head: str,
        tools: Sequence[Mapping[str, Any]],
        seconds: float,
    ) -> None:
        self._parse = parse
        self._form = form
        self._head = form.before(head)
        self._tools = tools
        self._seconds = seconds

    def __call__(self, item: str) -> Any:
        """The argument as an object with one member.

        Raises:
            Exception: anything, because the text comes from a model.
        """
        masked = self._form.masked
        mask = _unused_char(item) if masked and masked in item else None
        shown = item if mask is None else item.replace(masked, mask)
        arguments = self._parsed(self._head + shown + self._form.closing)
        return arguments if mask is None else _replaced(arguments, mask, masked)

    def _parsed(self, text: str) -> Any:
        if self._seconds <= 0:
            raise TimeUp
        started = time.thread_time()
        try:
            call: Any = within(self._seconds, lambda: self._parse(text, self._tools))
        finally:
            self._seconds -= time.thread_time() - started
        return (call[0] if isinstance(call, list) else call)["arguments"]


def _unused_char(text: str) -> str:
    """A character of Unicode's private use area that ``text`` does not contain."""
    return next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)


def _replaced(value: Any, old: str, new: str) -> Any:
    """``value`` with ``old`` replaced in all of its strings."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    if isinstance(value, dict):
        return {_replaced(k, old, new): _replaced(v, old, new) for k, v in value.items()}
    return value
