"""Parses the text of tool calls, as a model writes it, into deltas for the client."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from chairlift.api.chat.call_arguments import (
    ArgumentText,
    ConvertedArguments,
    JsonArguments,
    encode,
)
from chairlift.api.chat.call_forms import JSON_HEAD, CallForm, CallHead
from chairlift.api.chat.call_items import ItemConverter, splitter
from chairlift.api.chat.json_text import ObjectText
from chairlift.api.text.alarm import within
from chairlift.api.text.chat_format import ToolParser
from chairlift.api.text.choice import CallDelta, CallOpening

# A longer call is passed on as text. The longest calls of real agents write a whole file.
MAX_CALL_CHARS = 1 << 17
# mlx-lm's parsers are regular expressions, which block the event loop. They parse a normal call in
# milliseconds, but some need minutes for an adversarial text of that length.
PARSE_SECONDS = 0.2
# The head of a call is shorter, so in a longer text without one none is expected.
MAX_HEAD_CHARS = 2048
# An id that the model wrote is kept only if it matches this.
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class CallParser(Protocol):
    """Parses the calls of one choice, one block after the other.

    A block is the text between two tags. ``rest`` is the text of a block that belongs to no call;
    it is for the user. ``in_string`` is whether the text so far ends inside a value of a call, in
    which a tag is only text.
    """

    rest: str

    @property
    def in_string(self) -> bool: ...

    def begin(self) -> None:
        """Begins the next block."""
        ...

    def add(self, text: str) -> list[CallDelta]:
        """Takes more text of the block; returns the deltas that are certain now."""
        ...

    def end(self, cut: bool) -> list[CallDelta] | None:
        """Ends the block; returns the remaining deltas, or None if it contained no call.

        If ``cut``, the model did not end the block itself: an incomplete call stays incomplete, and
        the text of a call whose name is incomplete is dropped.
        """
        ...


class NativeCallParser:
    """Parses calls in the model's native format, while they arrive if the format is known.

    A call begins for the client as soon as the name of its function is certain. A block that does
    not begin like a call of a known function is parsed by mlx-lm's parser when it is complete.

    Args:
        parse: mlx-lm's parser.
        form: how calls are written; None if only mlx-lm's parser knows it.
        tools: the request's tools in OpenAI's format.
        short_ids: see ``new_id``.
    """

    def __init__(
        self,
        parse: ToolParser,
        form: CallForm | None,
        tools: Sequence[Mapping[str, Any]],
        short_ids: bool,
    ) -> None:
        self.rest = ""
        self._count = 0
        self._parse = parse
        self._form = form
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._short_ids = short_ids
        self.begin()

    @property
    def in_string(self) -> bool:
        return self._arguments is not None and self._arguments.in_string

    def begin(self) -> None:
        self.rest = ""
        # The arguments of the current call; None between calls.
        self._arguments: ArgumentText | None = None
        # The text after the last call, in which no call was found yet.
        self._parts: list[str] = []
        self._chars = 0
        self._first = self._count
        self._is_readable = self._form is not None

    def add(self, text: str) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        if self._arguments is None:
            self._parts.append(text)
            self._chars += len(text)
            text = ""
        while self._arguments is not None or self._begin_call(deltas):
            assert self._arguments is not None
            if self._chars:  # a call has just begun
                text, self._parts, self._chars = self._parts.pop(), [], 0
            if written := self._arguments.add(text):
                deltas.append(CallDelta(self._count - 1, None, written))
            if not self._arguments.ended:
                break
            self._parts = [self._arguments.rest]
            self._chars = len(self._arguments.rest)
            self._arguments = None
        return deltas

    def end(self, cut: bool) -> list[CallDelta] | None:
        deltas = []
        if self._arguments is not None:
            if not cut and (written := self._arguments.finish()):
                deltas.append(CallDelta(self._count - 1, None, written))
            return deltas
        text = "".join(self._parts)
        if cut:
            return []
        if self._count > self._first:
            assert self._form is not None
            self.rest = text[self._form.after_end(text) :]
            return []
        if len(text) <= MAX_CALL_CHARS:
            for call in _parse_whole(self._parse, text, self._tools, self._names):
                deltas.append(self._opening(call.name, call.id))
                deltas.append(CallDelta(self._count - 1, None, call.arguments))
        self.rest = "" if deltas else text
        return deltas or None

    def _begin_call(self, deltas: list[CallDelta]) -> bool:
        """Begins the next call if its head has arrived; leaves the text after the head."""
        if not self._is_readable or self._form is None or not self._chars:
            return False
        text = "".join(self._parts)
        self._parts = [text]
        found = self._form.find_head(text, after_call=self._count > self._first)
        if found is None:
            self._is_readable = self._chars <= MAX_HEAD_CHARS
            return False
        head, match = found
        if match["name"] not in self._names:
            self._is_readable = False
            return False
        deltas.append(self._opening(match["name"], match.groupdict().get("id")))
        self._parts = [text[match.end() :]]
        self._arguments = self._new_arguments(head, match)
        return True

    def _new_arguments(self, head: CallHead, match: re.Match[str]) -> ArgumentText:
        if head.items is None:
            return JsonArguments()
        assert self._form is not None
        convert = ItemConverter(self._parse, self._form, match[0], self._tools, PARSE_SECONDS)
        return ConvertedArguments(splitter(head.items), convert, bool(head.items.end))

    def _opening(self, name: str, identity: str | None) -> CallDelta:
        self._count += 1
        opening = CallOpening(valid_id(identity) or new_id(self._short_ids), name)
        return CallDelta(self._count - 1, opening, "")


class JsonCallParser:
    """Parses JSON calls while they arrive; a grammar makes the model write them well-formed."""

    def __init__(self, short_ids: bool) -> None:
        self.rest = ""
        self._text = ""
        self._count = 0
        self._short_ids = short_ids
        # None until the arguments begin.
        self._arguments: ObjectText | None = None

    @property
    def in_string(self) -> bool:
        return self._arguments is not None and self._arguments.in_string

    def begin(self) -> None:
        self.rest = self._text = ""
        self._arguments = None

    def add(self, text: str) -> list[CallDelta]:
        deltas = []
        if self._arguments is None:
            self._text += text
            if (head := JSON_HEAD.pattern.match(self._text)) is None:
                return []
            opening = CallOpening(new_id(self._short_ids), head["name"])
            deltas.append(CallDelta(self._count, opening, ""))
            self._count += 1
            self._arguments, text = ObjectText(), self._text[head.end() :]
        # Drop the text after the arguments, which only closes the call.
        if arguments := self._arguments.add(text):
            deltas.append(CallDelta(self._count - 1, None, arguments))
        return deltas

    def end(self, cut: bool) -> list[CallDelta] | None:
        if self._arguments is None and not cut:
            self.rest = self._text
            return None
        return []


def new_id(short: bool) -> str:
    """A new call id. ``short`` gives the 9 characters that Mistral's templates require."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


def valid_id(identity: object) -> str | None:
    """The call id that the model wrote, if it is one."""
    return identity if isinstance(identity, str) and _ID.fullmatch(identity) else None


class _ParsedCall(NamedTuple):
    id: str | None
    name: str
    arguments: str


def _parse_whole(
    parse: ToolParser, text: str, tools: Sequence[Mapping[str, Any]], names: Collection[str]
) -> list[_ParsedCall]:
    """The calls in the text of a block; empty if it is malformed or takes too long."""
    # NOTE: parsers can raise or return anything, because the text comes from a model.
    try:
        found = within(PARSE_SECONDS, lambda: parse(text, tools))
        calls = found if isinstance(found, list) else [found]
        return [_checked(call, names) for call in calls]
    except Exception:
        return []


def _checked(call: Any, names: Collection[str]) -> _ParsedCall:
    name, arguments = call["name"], call["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if name not in names or not isinstance(arguments, dict):
        raise ValueError("not a call of one of the tools")
    return _ParsedCall(valid_id(call.get("id")), name, encode(arguments))
