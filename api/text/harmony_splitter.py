"""Splits a reply in gpt-oss's Harmony format into text for the user, thoughts and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chairlift.api.text.chat_format import CALL, HEADER, NORMAL, THOUGHT
from chairlift.api.text.harmony import (
    NAMESPACE,
    HarmonyTokens,
    is_empty_header,
    may_be_header,
    parse_header,
)
from chairlift.api.text.splitter import ReplyRules, Segment
from chairlift.api.text.stream import Detokenizer

# Between two messages of one kind.
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class HarmonyRules(ReplyRules):
    """The format of a reply; the counterpart of ``splitter.Rules``.

    Attributes:
        tokens: the format's tokens, which are not ``hidden``.
    """

    tokens: HarmonyTokens

    def splitter(
        self,
        detokenizer: Callable[[], Detokenizer],
        in_string: Callable[[], bool] | None = None,
    ) -> HarmonySplitter:
        """A splitter for one reply. Tags are tokens, so ``in_string`` is not needed."""
        return HarmonySplitter(self, detokenizer)


class HarmonySplitter:
    """Splits one reply, token by token; the counterpart of ``splitter.Splitter``.

    A message to a function begins with its header, up to and with ``<|message|>``. So does one
    that has no place in a reply, such as a user's: its text is for the user, and nothing is lost.
    A header without a message is text, too.
    """

    pending_chars = 0

    def __init__(self, rules: HarmonyRules, detokenizer: Callable[[], Detokenizer]) -> None:
        self.state = rules.initial
        self.in_tag = False
        self._rules = rules
        self._tokens = rules.tokens
        self._new_detokenizer = detokenizer
        self._detokenizer = detokenizer()
        # The text of the header so far, while the state is HEADER.
        self._header = ""
        # The state of the last text.
        self._shown: str | None = None
        self._needs_separator = False

    def add(self, token: int) -> Iterator[Segment]:
        """Takes the next token; yields the segments that are certain now."""
        tokens = self._tokens
        in_header = self.state == HEADER
        if token in tokens.ends or (token in tokens.starts and not in_header):
            yield from self.finish()
            yield from self._enter(HEADER)
            if token in tokens.starts:
                self._header = tokens.texts[token]
        elif token in tokens.texts:
            yield from self._flush()
            yield from self._add_tag(token)
        elif token not in self._rules.hidden_in(self.state):
            self._detokenizer.add_token(token)
            yield from self._pass_on(self._detokenizer.last_segment)

    def finish(self, cut: bool = False) -> Iterator[Segment]:
        """Yields the remaining segments, at the end of the reply or of a message.

        If ``cut``, the model had not ended the reply. Then an incomplete header is left out, and so
        is an incomplete character of a call.
        """
        self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        yield from self._pass_on(text.rstrip("\ufffd") if cut and self.state == CALL else text)
        self._detokenizer = self._new_detokenizer()
        if self.state == HEADER and not is_empty_header(self._header):
            self.in_tag = cut
            header, self._header = self._header, ""
            if not cut:
                yield from self._enter(NORMAL)
                yield from self._pass_on(header)

    def _flush(self) -> Iterator[Segment]:
        """Yields the text that the detokenizer has kept back."""
        self._detokenizer.finalize()
        yield from self._pass_on(self._detokenizer.last_segment)
        self._detokenizer = self._new_detokenizer()

    def _add_tag(self, token: int) -> Iterator[Segment]:
        text = self._tokens.texts[token]
        if self.state != HEADER or token != self._tokens.message:
            yield from self._pass_on(text)
            return
        header, self._header = self._header, ""
        is_reply, channel, recipient = parse_header(header)
        is_call = recipient is not None and (
            recipient.startswith(NAMESPACE) or channel != "analysis"
        )
        if not is_reply:
            yield from self._enter(NORMAL)
            yield from self._pass_on(header + text)
        elif is_call:
            yield from self._enter(CALL)
            yield Segment(CALL, header + text)
        else:
            yield from self._enter(THOUGHT if channel == "analysis" else NORMAL)

    def _enter(self, state: str) -> Iterator[Segment]:
        self.state = state
        self._header = ""
        self._needs_separator = state == self._shown
        yield Segment(state, "")

    def _pass_on(self, text: str) -> Iterator[Segment]:
        if not text:
            return
        if self.state == HEADER:
            self._header += text
            if may_be_header(self._header):
                return
            text = self._header
            yield from self._enter(NORMAL)
        if self._needs_separator:
            text = _SEPARATOR + text
        self._needs_separator = False
        self._shown = self.state
        yield Segment(self.state, text)
