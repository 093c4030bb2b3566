"""From a call's text, as a model wrote it, to the deltas that a client is told."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from chairlift.api.chat_format import ToolParser
from chairlift.api.choice import CallDelta, CallOpening

# Parsers are regular expressions that nobody answers for, and some take a time quadratic in the
# text. Longer calls are text; the longest one seen in the wild is a file to be written.
MAX_CALL_CHARS = 1 << 17
# An id of the model's own is kept only if it is harmless.
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# How a call in JSON begins, up to the arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*', re.ASCII)


class Calls(Protocol):
    """Reads one reply's calls, one after the other. ``count`` is how many there were.

    ``text`` is that of the call which is being read.
    """

    count: int
    text: str

    def begin(self) -> None:
        """The next call's text begins."""
        ...

    def add(self, text: str) -> list[CallDelta]:
        """Takes more of it; returns what is certain now."""
        ...

    def end(self) -> list[CallDelta] | None:
        """The call's text has ended; returns the rest, or None if ``text`` is no call."""
        ...


class ParsedCalls:
    """Calls in a model's own format, which mlx-lm's parser for it reads once they are whole.

    ``tools`` are those of the request, in OpenAI's form.
    """

    def __init__(
        self, parse: ToolParser, tools: Sequence[Mapping[str, Any]], short_ids: bool
    ) -> None:
        self.count = 0
        self.text = ""
        self._parse = parse
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._short_ids = short_ids
        self._parts: list[str] = []
        self._chars = 0

    def begin(self) -> None:
        self.text = ""
        self._parts = []

    def add(self, text: str) -> list[CallDelta]:
        self._parts.append(text)
        return []

    def end(self) -> list[CallDelta] | None:
        self.text = "".join(self._parts)
        calls = _parsed(self._parse, self.text, self._tools, self._names)
        deltas = []
        for call in calls:
            opening = CallOpening(call.id or new_id(self._short_ids), call.name)
            deltas.append(CallDelta(self.count, opening, ""))
            deltas.append(CallDelta(self.count, None, call.arguments))
            self.count += 1
        return deltas or None


class StreamedCalls:
    """Calls in JSON which a grammar keeps well-formed, so that they can be told as they come."""

    def __init__(self, short_ids: bool) -> None:
        self.count = 0
        self.text = ""
        self._short_ids = short_ids
        self._told: int | None = None

    def begin(self) -> None:
        self.text = ""
        self._told = None

    def add(self, text: str) -> list[CallDelta]:
        self.text += text
        deltas = []
        if self._told is None:
            head = _HEAD.match(self.text)
            if head is None:
                return []
            deltas.append(CallDelta(self.count, CallOpening(new_id(self._short_ids), head[1]), ""))
            self._told = head.end()
            self.count += 1
        # The last brace is the call's, and not the arguments'.
        certain = len(self.text.rstrip().removesuffix("}").rstrip().removesuffix("}"))
        return deltas + self._tell(certain)

    def end(self) -> list[CallDelta] | None:
        if self._told is None:
            return None
        return self._tell(len(self.text.rstrip().removesuffix("}").rstrip()))

    def _tell(self, until: int) -> list[CallDelta]:
        assert self._told is not None
        arguments = self.text[self._told : until]
        if not arguments:
            return []
        self._told = until
        return [CallDelta(self.count - 1, None, arguments)]


def new_id(short: bool) -> str:
    """A call's id. ``short`` is the form that Mistral's templates insist on."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


class _Parsed(NamedTuple):
    id: str | None
    name: str
    arguments: str


def _parsed(
    parse: ToolParser, text: str, tools: Sequence[Mapping[str, Any]], names: Collection[str]
) -> list[_Parsed]:
    """The calls in a text; none if it is malformed in any way."""
    if len(text) > MAX_CALL_CHARS:
        return []
    # NOTE: what a parser raises, and returns, on a text that a model made up can be anything.
    try:
        found = parse(text, tools)
        return [_checked(call, names) for call in (found if isinstance(found, list) else [found])]
    except Exception:
        return []


def _checked(call: Any, names: Collection[str]) -> _Parsed:
    name, arguments, identity = call["name"], call["arguments"], call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if name not in names or not isinstance(arguments, dict):
        raise ValueError("not a call of one of the tools")
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= char <= "\udfff" for char in encoded):  # UTF-8 has no lone surrogates
        encoded = json.dumps(arguments, allow_nan=False)
    kept = isinstance(identity, str) and _ID.fullmatch(identity)
    return _Parsed(identity if kept else None, name, encoded)
