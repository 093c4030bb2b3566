"""Parses the text of tool calls, as a model writes it, into deltas for the client."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from chairlift.api.chat.json_text import ObjectText
from chairlift.api.text.alarm import TimeUp, within
from chairlift.api.text.chat_format import JSON_TOOLS, ToolParser
from chairlift.api.text.choice import CallDelta, CallOpening

# A longer call is passed on as text. The longest calls of real agents write a whole file.
MAX_CALL_CHARS = 1 << 17
# mlx-lm's parsers are regular expressions, which block the event loop. They parse a normal call in
# milliseconds, but some need minutes for an adversarial text of that length.
PARSE_SECONDS = 0.2
# An id that the model wrote is kept only if it matches this.
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# The beginning of a JSON call, up to its arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)', re.ASCII)
# The end of a call inside the text between the tags, by parser. It finds the complete calls in a
# text that was cut. Parsers that find different arguments in a shortened text are not listed.
_CLOSINGS = {
    JSON_TOOLS: r"\}\s*\Z",
    "mistral": r"[}\]](?=\s*[\w-]+\s*\[ARGS\]|\s*\Z)",
    "kimi_k2": r"<\|tool_call_end\|>",
    "kimi_k3": r"<\|close\|>call<\|sep\|>",
    "minimax_m2": r"</invoke>",
}
# The parser is tried with at most this many possible ends of the last complete call.
_MAX_CLOSINGS = 8


class CallParser(Protocol):
    """Parses the calls of one choice, one after the other.

    ``text`` is the text of the current call. ``in_string`` is whether it ends inside a JSON string,
    in which a tag is only text.
    """

    text: str

    @property
    def in_string(self) -> bool: ...

    def begin(self) -> None:
        """Begins the next call."""
        ...

    def add(self, text: str) -> list[CallDelta]:
        """Takes more text of the call; returns the deltas that are certain now."""
        ...

    def end(self, cut: bool) -> list[CallDelta] | None:
        """Ends the call; returns the remaining deltas, or None if ``text`` is not a call.

        If ``cut``, the model did not end the call itself, and only complete calls are returned.
        """
        ...


class NativeCallParser:
    """Parses calls in the model's native format, each when it is complete.

    Args:
        parse: mlx-lm's parser.
        parser_name: the name of that parser.
        tools: the request's tools in OpenAI's format.
        short_ids: see ``new_id``.
    """

    in_string = False

    def __init__(
        self,
        parse: ToolParser,
        parser_name: str,
        tools: Sequence[Mapping[str, Any]],
        short_ids: bool,
    ) -> None:
        self.text = ""
        self._count = 0
        self._parse = parse
        self._closing = _CLOSINGS.get(parser_name)
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._short_ids = short_ids
        self._parts: list[str] = []

    def begin(self) -> None:
        self.text = ""
        self._parts = []

    def add(self, text: str) -> list[CallDelta]:
        self._parts.append(text)
        return []

    def end(self, cut: bool) -> list[CallDelta] | None:
        self.text = "".join(self._parts)
        calls = _parse_first(self._parse, self._candidates(cut), self._tools, self._names)
        deltas = []
        for call in calls:
            opening = CallOpening(call.id or new_id(self._short_ids), call.name)
            deltas.append(CallDelta(self._count, opening, ""))
            deltas.append(CallDelta(self._count, None, call.arguments))
            self._count += 1
        return deltas or ([] if cut else None)

    def _candidates(self, cut: bool) -> list[str]:
        """The texts to parse: the call or, if it was cut, the part up to each possible end."""
        if len(self.text) > MAX_CALL_CHARS:
            return []
        if not cut:
            return [self.text]
        if self._closing is None:
            return []
        ends = [match.end() for match in re.finditer(self._closing, self.text)]
        return [self.text[:end] for end in ends[: -_MAX_CLOSINGS - 1 : -1]]


class JsonCallParser:
    """Parses JSON calls while they arrive; a grammar makes the model write them well-formed."""

    def __init__(self, short_ids: bool) -> None:
        self.text = ""
        self._count = 0
        self._short_ids = short_ids
        # None until the arguments begin.
        self._arguments: ObjectText | None = None

    @property
    def in_string(self) -> bool:
        return self._arguments is not None and self._arguments.in_string

    def begin(self) -> None:
        self.text = ""
        self._arguments = None

    def add(self, text: str) -> list[CallDelta]:
        deltas = []
        if self._arguments is None:
            self.text += text
            if (head := _HEAD.match(self.text)) is None:
                return []
            deltas.append(CallDelta(self._count, CallOpening(new_id(self._short_ids), head[1]), ""))
            self._count += 1
            self._arguments, text = ObjectText(), self.text[head.end() :]
        # Drop the text after the arguments, which only closes the call.
        if arguments := self._arguments.add(text):
            deltas.append(CallDelta(self._count - 1, None, arguments))
        return deltas

    def end(self, cut: bool) -> list[CallDelta] | None:
        return None if self._arguments is None and not cut else []


def new_id(short: bool) -> str:
    """A new call id. ``short`` gives the 9 characters that Mistral's templates require."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


class _ParsedCall(NamedTuple):
    id: str | None
    name: str
    arguments: str


def _parse_first(
    parse: ToolParser,
    texts: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    names: Collection[str],
) -> list[_ParsedCall]:
    """The calls of the first text with well-formed calls; empty if none is found in time."""

    def attempt() -> list[_ParsedCall]:
        for text in texts:
            # NOTE: parsers can raise or return anything, because the text comes from a model.
            try:
                found = parse(text, tools)
                calls = found if isinstance(found, list) else [found]
                if checked := [_checked(call, names) for call in calls]:
                    return checked
            except TimeUp:
                raise
            except Exception:
                continue
        return []

    try:
        return within(PARSE_SECONDS, attempt)
    except TimeUp:
        return []


def _checked(call: Any, names: Collection[str]) -> _ParsedCall:
    name, arguments, identity = call["name"], call["arguments"], call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if name not in names or not isinstance(arguments, dict):
        raise ValueError("not a call of one of the tools")
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= char <= "\udfff" for char in encoded):  # UTF-8 has no lone surrogates
        encoded = json.dumps(arguments, allow_nan=False)
    is_valid_id = isinstance(identity, str) and _ID.fullmatch(identity)
    return _ParsedCall(identity if is_valid_id else None, name, encoded)
