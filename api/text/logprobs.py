"""Log-probabilities in OpenAI's two formats, released together with their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from chairlift.api.schemas.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from chairlift.engine.messages import TokenLogprobs

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# JSON has no -inf; this is OpenAI's number for "very unlikely".
LOWEST = -9999.0


class Scored(NamedTuple):
    """One token's log-probabilities; ``start`` is the offset of its text, in characters."""

    token: int
    logprobs: TokenLogprobs
    start: int


class LogprobQueue:
    """Buffers the log-probabilities of tokens until their text is released or dropped."""

    def __init__(self) -> None:
        self._waiting: deque[Scored] = deque()

    def add(self, scored: Scored) -> None:
        """Adds the next token."""
        self._waiting.append(scored)

    def take(self, sent: int) -> list[Scored]:
        """Removes and returns the tokens of the first ``sent`` characters of the text."""
        ready = []
        # A token without text, with the first bytes of a character, waits for that character.
        while self._waiting and self._waiting[0].start < sent:
            ready.append(self._waiting.popleft())
        return ready

    def take_rest(self) -> list[Scored]:
        """Removes and returns all tokens, at the end of a text that was not cut."""
        rest, self._waiting = list(self._waiting), deque()
        return rest

    def drop_rest(self) -> None:
        """Drops all tokens, because they turned out not to be text."""
        self._waiting.clear()


def clamp(logprob: float) -> float:
    """The log-probability, or OpenAI's lowest number if it is less (JSON has no -inf)."""
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(scored: Sequence[Scored], vocabulary: Vocabulary) -> ChatLogprobs:
    """The format of /v1/chat/completions."""
    content = []
    for entry in scored:
        shown = vocabulary.token_text(entry.token)
        top = []
        for token, logprob in entry.logprobs.top:
            text, raw = vocabulary.token_text(token)
            top.append(TopLogprob(text, clamp(logprob), raw))
        content.append(TokenLogprob(shown.text, clamp(entry.logprobs.logprob), shown.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    scored: Sequence[Scored], vocabulary: Vocabulary, top: int, before: int = 0
) -> CompletionLogprobs:
    """The format of /v1/completions.

    ``top`` is the requested number of most likely tokens. ``before`` is the number of characters of
    the echoed prompt before the choice's text.
    """
    best = [_by_text(entry, vocabulary) for entry in scored] if top else None
    return CompletionLogprobs(
        tokens=[vocabulary.token_text(entry.token).text for entry in scored],
        token_logprobs=[clamp(entry.logprobs.logprob) for entry in scored],
        top_logprobs=best,
        text_offset=[before + entry.start for entry in scored],
    )


def joined(one: CompletionLogprobs, other: CompletionLogprobs) -> CompletionLogprobs:
    """The log-probabilities of two consecutive texts, as those of one."""
    tops = None
    if one.top_logprobs is not None and other.top_logprobs is not None:
        tops = [*one.top_logprobs, *other.top_logprobs]
    return CompletionLogprobs(
        one.tokens + other.tokens,
        one.token_logprobs + other.token_logprobs,
        tops,
        one.text_offset + other.text_offset,
    )


def _by_text(scored: Scored, vocabulary: Vocabulary) -> dict[str, float] | None:
    """The most likely tokens by their texts, and the token itself, as OpenAI's API has them."""
    by_text: dict[str, float] = {}
    own = (scored.token, scored.logprobs.logprob)
    for token, logprob in (*scored.logprobs.top, own):  # the most likely of equal texts
        by_text.setdefault(vocabulary.token_text(token).text, clamp(logprob))
    return by_text
