"""The native formats of calls: where a call's name, each of its arguments and its end are.

mlx-lm's parsers need complete calls. These tables add what is needed to read a call while the
model writes it; values are still converted by mlx-lm's parser, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.api.text.chat_format import JSON_TOOLS


class Delimited(NamedTuple):
    """Arguments between tags.

    An argument reaches from one of the texts that ``opens`` matches to the next ``close``. ``end``
    ends the call; if it is empty, the tag after the calls does.
    """

    opens: re.Pattern[str]
    close: str
    end: str


class Listed(NamedTuple):
    """Arguments separated by commas, up to the bracket ``end``.

    A string reaches from one of ``quotes`` to the next occurrence of the same. ``escapes`` is
    whether a backslash makes the next character part of the string.
    """

    end: str
    quotes: tuple[str, ...]
    escapes: bool


@dataclass(frozen=True, slots=True)
class CallHead:
    """The beginning of a call up to its arguments.

    The groups of ``pattern`` are ``name`` and, if the model writes one, ``id``. ``items`` is the
    syntax of the arguments; None for a JSON object.
    """

    pattern: re.Pattern[str]
    items: Delimited | Listed | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the calls between two tags are written.

    Attributes:
        heads: the possible beginnings of a call.
        after: matches what may follow a call before the next one.
        opening, closing: complete a call with one argument for mlx-lm's parser.
        masked: the text that mlx-lm's parser takes for the end of a call even inside a value.
    """

    heads: tuple[CallHead, ...]
    after: re.Pattern[str] = re.compile(r"\s*")
    opening: str = ""
    closing: str = ""
    masked: str = ""

    def find_head(self, text: str, after_call: bool) -> tuple[CallHead, re.Match[str]] | None:
        """The head at the beginning of ``text``, which may follow a call; None if there is none."""
        start = self.after_end(text) if after_call else 0
        matches = ((head, head.pattern.match(text, start)) for head in self.heads)
        return next(((head, match) for head, match in matches if match is not None), None)

    def after_end(self, text: str) -> int:
        """The number of characters of ``text`` that belong to the call before it."""
        match = self.after.match(text)
        return 0 if match is None else match.end()

    def before(self, head: str) -> str:
        """The text before a call's arguments for mlx-lm's parser."""
        head = head.strip()
        return head if head.startswith(self.opening) else self.opening + head


def _pattern(text: str) -> re.Pattern[str]:
    name = r"(?P<name>[\w.-]+)"
    return re.compile(text.replace("@NAME@", name), re.ASCII | re.DOTALL)


# ``{"name": "f", "arguments": {``
_JSON_CALL = r'\{\s*"name"\s*:\s*"@NAME@"\s*,\s*"arguments"\s*:\s*(?=\{)'
JSON_HEAD = CallHead(_pattern(r"\s*" + _JSON_CALL))
_AFTER_JSON = re.compile(r"\s*(?:,[^{}]*)?[}\]]*\s*")

_QWEN = Delimited(re.compile("<parameter="), "</parameter>", "</function>")
_GLM = Delimited(re.compile("<arg_key>"), "</arg_value>", "")
_LONGCAT = Delimited(re.compile("<longcat_arg_key>"), "</longcat_arg_value>", "")
_MINIMAX = Delimited(re.compile("<parameter name="), "</parameter>", "</invoke>")
_MINICPM = Delimited(re.compile(r"<param\s"), "</param>", "")
_MUSE = Delimited(re.compile(r"<atem:parameter\b"), "</atem:parameter>", "</atem:invoke>")
_KIMI = Delimited(
    re.compile(r"<\|open\|>argument\b"), "<|close|>argument<|sep|>", "<|close|>call<|sep|>"
)
_KIMI_CALL = (
    r'\s*<\|open\|>call\b(?:(?!<\|sep\|>).)*?\btool="@NAME@"(?:(?!<\|sep\|>).)*<\|sep\|>\s*'
)
_PYTHON = Listed(")", ('"""', "'''", '"', "'"), escapes=True)
_GEMMA = Listed("}", ('<|"|>',), escapes=False)
_FUNCTION_GEMMA = Listed("}", ("<escape>",), escapes=False)
# glm47, laguna
_GLM_FORM = CallForm(
    (CallHead(_pattern(r"\s*@NAME@\s*(?=<arg_key>)"), _GLM), JSON_HEAD), _AFTER_JSON
)

# By the names of mlx-lm's parsers. Calls of other parsers are read when they are complete.
FORMS: Mapping[str, CallForm] = {
    JSON_TOOLS: CallForm((JSON_HEAD,), _AFTER_JSON),
    "mistral": CallForm(
        (
            CallHead(_pattern(r"\s*@NAME@\s*\[ARGS\]\s*(?=\{)")),
            CallHead(_pattern(r"\s*\[?\s*" + _JSON_CALL)),
        ),
        re.compile(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}?\s*[,\]]?\s*'),
    ),
    "kimi_k2": CallForm(
        (
            CallHead(
                _pattern(
                    r"\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?@NAME@:\d+)\s*"
                    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
                )
            ),
        ),
        re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    ),
    "qwen3_coder": CallForm(
        (CallHead(_pattern(r"\s*<function=@NAME@\s*>"), _QWEN),), closing="</function>"
    ),
    "glm47": _GLM_FORM,
    "laguna": _GLM_FORM,
    "longcat": CallForm(
        (CallHead(_pattern(r"\s*@NAME@\s*(?=<longcat_arg_key>)"), _LONGCAT), JSON_HEAD), _AFTER_JSON
    ),
    "minicpm5": CallForm(
        (CallHead(_pattern(r"\s*[\"']?@NAME@[\"']?\s*>"), _MINICPM),), masked="</function>"
    ),
    "minimax_m2": CallForm(
        (CallHead(_pattern(r"\s*<invoke name=[\"']?@NAME@[\"']?\s*>"), _MINIMAX),),
        closing="</invoke>",
        masked="</invoke>",
    ),
    "muse_spark": CallForm(
        (CallHead(_pattern(r"\s*<atem:invoke\b[^>]*?\bname=\"@NAME@\">"), _MUSE),),
        closing="</atem:invoke>",
    ),
    "kimi_k3": CallForm(
        (
            CallHead(_pattern(_KIMI_CALL + r"<\|open\|>json(?:(?!<\|sep\|>).)*<\|sep\|>\s*(?=\{)")),
            CallHead(_pattern(_KIMI_CALL + r"(?=<\|open\|>argument\b|<\|close\|>call)"), _KIMI),
        ),
        re.compile(r"\s*(?:<\|close\|>json<\|sep\|>)?\s*(?:<\|close\|>call<\|sep\|>)?\s*"),
        closing="<|close|>call<|sep|>",
        masked="<|close|>call<|sep|>",
    ),
    "pythonic": CallForm(
        (CallHead(_pattern(r"\s*\[?\s*@NAME@\("), _PYTHON),),
        re.compile(r"\s*[,\]]?\s*"),
        opening="[",
        closing=")]",
    ),
    "gemma4": CallForm((CallHead(_pattern(r"\s*call:@NAME@\{"), _GEMMA),), closing="}"),
    "function_gemma": CallForm(
        (CallHead(_pattern(r"\s*call:@NAME@\{"), _FUNCTION_GEMMA),), closing="}", masked="}"
    ),
}
