"""From a call's text, as a model wrote it, to the deltas that a client is told."""

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

# Longer calls are text; the longest ones of real agents write a file.
MAX_CALL_CHARS = 1 << 17
# Parsers are regular expressions that nobody answers for. A call takes them some milliseconds, but
# some need minutes for a text as long as that which is made for it. Meanwhile all streams wait.
PARSE_SECONDS = 0.2
# An id of the model's own is kept only if it is harmless.
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# How a call in JSON begins, up to the arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)', re.ASCII)
# By parser, what ends a call inside the text between the tags. Only parsers that read a call up to
# there as they read it in a longer text: others find other arguments in the beginning of a call.
_CLOSINGS = {
    JSON_TOOLS: r"\}\s*\Z",
    "mistral": r"[}\]](?=\s*[\w-]+\s*\[ARGS\]|\s*\Z)",
    "kimi_k2": r"<\|tool_call_end\|>",
    "kimi_k3": r"<\|close\|>call<\|sep\|>",
    "minimax_m2": r"</invoke>",
}
# Places that may end the last complete call of a text that was cut; each is tried with the parser.
_MAX_CLOSINGS = 8


class Calls(Protocol):
    """Reads one reply's calls, one after the other.

    ``text`` is that of the call which is being read. ``in_string``: it ends inside a string of
    JSON, where the text of a tag is only text.
    """

    text: str

    @property
    def in_string(self) -> bool: ...

    def begin(self) -> None:
        """The next call's text begins."""
        ...

    def add(self, text: str) -> list[CallDelta]:
        """Takes more of it; returns what is certain now."""
        ...

    def end(self, cut: bool) -> list[CallDelta] | None:
        """The call's text has ended; returns the rest, or None if ``text`` is no call.

        ``cut``: not by the model; more of it would have come. The rest is that of complete calls.
        """
        ...


class ParsedCalls:
    """Calls in a model's own format, which mlx-lm's parser ``parse`` reads once they are complete.

    ``parser_name`` is mlx-lm's name of it. ``tools`` are those of the request, in OpenAI's form.
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
        calls = _parsed(self._parse, self._readings(cut), self._tools, self._names)
        deltas = []
        for call in calls:
            opening = CallOpening(call.id or new_id(self._short_ids), call.name)
            deltas.append(CallDelta(self._count, opening, ""))
            deltas.append(CallDelta(self._count, None, call.arguments))
            self._count += 1
        return deltas or ([] if cut else None)

    def _readings(self, cut: bool) -> list[str]:
        """What to give the parser: the text, or of one that was cut its complete calls."""
        if len(self.text) > MAX_CALL_CHARS:
            return []
        if not cut:
            return [self.text]
        if self._closing is None:
            return []
        ends = [match.end() for match in re.finditer(self._closing, self.text)]
        return [self.text[:end] for end in ends[: -_MAX_CLOSINGS - 1 : -1]]


class StreamedCalls:
    """Calls in JSON that a grammar keeps well-formed, so that they are passed on as they come."""

    def __init__(self, short_ids: bool) -> None:
        self.text = ""
        self._count = 0
        self._short_ids = short_ids
        # None before the arguments begin.
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
        # What follows the arguments closes the call.
        if arguments := self._arguments.add(text):
            deltas.append(CallDelta(self._count - 1, None, arguments))
        return deltas

    def end(self, cut: bool) -> list[CallDelta] | None:
        return None if self._arguments is None and not cut else []


def new_id(short: bool) -> str:
    """A call's id. ``short`` is the form that Mistral's templates insist on."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


class _Parsed(NamedTuple):
    id: str | None
    name: str
    arguments: str


def _parsed(
    parse: ToolParser,
    texts: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    names: Collection[str],
) -> list[_Parsed]:
    """The calls in the first of the texts that has any; none if all are malformed in any way."""

    def attempt() -> list[_Parsed]:
        for text in texts:
            # NOTE: what a parser raises, and returns, on a text that a model made up can be
            # anything.
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
