"""gpt-oss's Harmony format: the tokens of a reply's messages, and their headers.

A reply is a sequence of messages, each with a header that names a channel and perhaps a recipient:
``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``. The
prompt ends with ``<|start|>assistant``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

# The value of --tool-parser for this format.
HARMONY = "harmony"
# The prefix of a recipient that is one of the request's functions.
NAMESPACE = "functions."
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_START, _END, _CONSTRAIN = "<|start|>", "<|end|>", "<|constrain|>"
_RETURN, _CALL = "<|return|>", "<|call|>"
# A vocabulary with all of these is Harmony's.
_NEEDED = (_START, CHANNEL, MESSAGE, _END, _CALL)
ANALYSIS_HEADER = f"{CHANNEL}analysis{MESSAGE}"
FINAL_HEADER = f"{CHANNEL}final{MESSAGE}"
REPLY_START = f"{_START}assistant"
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_ROLE = "assistant"
# A header is shorter than this.
_MAX_HEADER_CHARS = 256
_MAX_HEADER_WORDS = 6


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """The ids of the format's tokens, and sequences of them.

    Attributes:
        starts: the tokens that begin a header, even without an end of the message before.
        ends: the tokens that end a message.
        message: the token between header and content.
        channel: the token before the channel in a header.
        constrain: the token before the type of a call's arguments, if there is one.
        texts: the texts of all of the format's tokens, by id.
        stops: the tokens after which the model generates nothing more.
        end: the token at the end of a message that is not the reply's last.
        analysis, final: the header of a message in these channels.
        next_reply: the tokens between two messages of a reply, without the header's channel.
    """

    starts: frozenset[int]
    ends: frozenset[int]
    message: int
    channel: int
    constrain: int | None
    texts: dict[int, str]
    stops: frozenset[int]
    end: int
    analysis: tuple[int, ...]
    final: tuple[int, ...]
    next_reply: tuple[int, ...]


class Header(NamedTuple):
    """The header of a message; ``recipient`` is None for a message to the user.

    ``is_reply`` is whether the assistant is its author.
    """

    is_reply: bool
    channel: str
    recipient: str | None


def harmony_tokens(tokenizer: Any) -> HarmonyTokens | None:
    """The format's tokens of a tokenizer, or None if it lacks them."""
    vocabulary = tokenizer.get_vocab()
    if not all(text in vocabulary for text in _NEEDED):
        return None

    def ids(*texts: str) -> frozenset[int]:
        return frozenset(vocabulary[text] for text in texts if text in vocabulary)

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    known = (*_NEEDED, _CONSTRAIN, _RETURN)
    return HarmonyTokens(
        starts=ids(_START, CHANNEL),
        ends=ids(_END, _RETURN, _CALL),
        message=vocabulary[MESSAGE],
        channel=vocabulary[CHANNEL],
        constrain=vocabulary.get(_CONSTRAIN),
        texts={vocabulary[text]: text for text in known if text in vocabulary},
        stops=ids(_RETURN, _CALL),
        end=vocabulary[_END],
        analysis=encoded(ANALYSIS_HEADER),
        final=encoded(FINAL_HEADER),
        next_reply=encoded(_END + REPLY_START),
    )


def parse_header(text: str) -> Header:
    """Parses the text before ``<|message|>``. The recipient may be in front of the channel."""
    role, _, _ = text.partition(CHANNEL)
    _, _, channel = text.rpartition(CHANNEL) if CHANNEL in text else ("", "", "")
    words = [word for word in role.removeprefix(_START).split() if not word.startswith("to=")]
    names = [word for word in channel.split() if not word.startswith("to=")]
    recipient = _RECIPIENT.search(text)
    return Header(
        all(word == _ROLE for word in words),
        names[0].partition("<")[0] if names else "",
        None if recipient is None else recipient[1],
    )


def is_empty_header(text: str) -> bool:
    """Whether a header without a message says nothing."""
    return text.removeprefix(_START).strip() in ("", _ROLE)


def may_be_header(text: str) -> bool:
    """Whether more text may complete ``text`` to a header; else the model wrote none."""
    return len(text) <= _MAX_HEADER_CHARS and len(text.split()) <= _MAX_HEADER_WORDS
