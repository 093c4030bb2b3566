"""One choice of a chat reply, in which the model may reason and call functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.api.chat.call_limits import CallLimits, LimitedCalls
from chairlift.api.chat.calls import CallParser
from chairlift.api.chat.reply_text import ReplyText, ThoughtText
from chairlift.api.text.chat_format import CALL, HEADER, THOUGHT, Tag
from chairlift.api.text.choice import CallDelta, Choice, OutputDelta
from chairlift.api.text.logprobs import LogprobQueue, Scored
from chairlift.api.text.stops import StopMatcher
from chairlift.api.text.stream import Detokenizer
from chairlift.engine.messages import TokenOutput

if TYPE_CHECKING:  # it imports mlx-lm, which takes a second
    from chairlift.api.text.harmony_splitter import HarmonyRules
    from chairlift.api.text.splitter import Rules, Segment

# The states whose tokens have no log-probabilities.
_UNSCORED = (THOUGHT, CALL, HEADER)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of calls in a reply.

    Attributes:
        start: the tag before a call.
        end: the tag after a call.
        new_parser: makes the parser of one choice's calls.
        limits: the limits on one choice's calls.
        is_constrained: whether a grammar makes the model complete every call that it begins.
    """

    start: Tag
    end: Tag
    new_parser: Callable[[], CallParser]
    limits: CallLimits
    is_constrained: bool


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """The syntax of a reply, a ``generate.generation.ChoiceFactory``.

    Attributes:
        rules: the tags that separate text, thoughts and calls.
        thinks: whether the reply may contain a thought.
        calls: the syntax of calls, or None if the model can call nothing.
    """

    rules: Rules | HarmonyRules
    thinks: bool
    calls: CallSyntax | None

    def new_choice(
        self,
        index: int,
        detokenizer: Callable[[], Detokenizer],
        matcher: StopMatcher,
        with_logprobs: bool,
    ) -> DialogueChoice:
        """See ``ChoiceFactory``."""
        return DialogueChoice(index, self, detokenizer, matcher, with_logprobs)


class DialogueChoice(Choice):
    """A choice whose deltas are reasoning, text or parts of calls, each delta of one kind.

    Only the text for the user has log-probabilities.
    """

    def __init__(
        self,
        index: int,
        syntax: ReplySyntax,
        detokenizer: Callable[[], Detokenizer],
        matcher: StopMatcher,
        with_logprobs: bool,
    ) -> None:
        super().__init__(index)
        self._state = syntax.rules.initial
        after_thought = self._state in (THOUGHT, HEADER)
        self._reply = ReplyText(matcher, not after_thought, syntax.calls is not None)
        self._thought = ThoughtText()
        self._call_syntax = syntax.calls
        self._parser = self._limited = None
        if syntax.calls is not None:
            self._parser = syntax.calls.new_parser()
            self._limited = LimitedCalls(syntax.calls.limits)
        self._ends = syntax.rules.ends
        in_string = None if self._parser is None else self._in_string
        self._splitter = syntax.rules.splitter(detokenizer, in_string)
        self._queue = LogprobQueue() if with_logprobs else None
        self._deltas: list[OutputDelta] = []

    @property
    def stop_string(self) -> str | None:
        return self._reply.stop_string

    def take(self, output: TokenOutput) -> list[OutputDelta]:
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        deltas = self._deltas = []
        self._add_tokens(output)
        if output.finish is not None and not self._is_over:
            self._flush(self._is_cut(output))
        if output.finish is not None or self._is_over:
            self._end_choice(output)
        return deltas

    def _add_tokens(self, output: TokenOutput) -> None:
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.tokens += 1
            if output.ended_by_token and position == last:
                return  # an end token counts as output but has no text
            pending = 0 if self._state in _UNSCORED else self._splitter.pending_chars
            self._reply.begin_token(pending)
            scored = None
            if self._queue is not None and output.logprobs is not None:
                scored = Scored(token, output.logprobs[position], self._reply.read + pending)
            self._add_token(token, scored)
            if self._is_over:
                return

    def _add_token(self, token: int, scored: Scored | None) -> None:
        before = self._state
        # Tokens that turn out to be a tag are dropped from the queue again.
        if self._queue is not None and scored is not None and before not in _UNSCORED:
            self._queue.add(scored)
            scored = None
        has_text = False
        for segment in self._splitter.add(token):
            has_text = True
            self._add_segment(segment)
            if self._is_over:
                break
        if self._queue is not None and has_text and not self._reply.begun:
            self._queue.drop_rest()  # blank lines, which are dropped
        if self._queue is not None and scored is not None and self._reply.read > scored.start:
            self._queue.add(scored)  # this token ends a tag and begins text
        self.reasoning_tokens += THOUGHT in (before, self._state)

    def _add_segment(self, segment: Segment) -> None:
        state, text = segment
        if state != self._state:
            self._leave(by_tag=True, cut=False)
            self._enter(state)
        if not text or self._is_over:
            return
        if state == THOUGHT:
            if thought := self._thought.add(text):
                self._deltas.append(OutputDelta(self.index, thought, None, None, thought=True))
        elif state == CALL and self._parser is not None:
            self._add_calls(self._parser.add(text))
        else:
            self._add_text(self._reply.add(text))

    def _flush(self, cut: bool) -> None:
        """Releases all buffered output at its end. ``cut``: the model had not ended the reply."""
        for segment in self._splitter.finish(cut):
            self._add_segment(segment)
        if self._splitter.in_tag:
            self._interrupt()
        self._leave(by_tag=False, cut=cut)

    def _is_cut(self, output: TokenOutput) -> bool:
        """Whether the output ends before the model has ended the reply itself."""
        if output.finish == "length" or self._call_syntax is None or self._state != CALL:
            return output.finish == "length"
        # Inside a call, a stop token of the client cuts the call. So does any end of the reply if a
        # grammar requires the call to be completed first.
        by_client = output.ended_by_token and output.token_ids[-1] not in self._ends
        return self._call_syntax.is_constrained or by_client

    def _enter(self, state: str) -> None:
        if state in (THOUGHT, CALL):
            self._interrupt()
        if state == CALL and self._parser is not None:
            self._parser.begin()
        self._state = state

    def _interrupt(self) -> None:
        """Flushes the text for the user, because a thought or a call begins."""
        self._add_text(self._reply.interrupt())
        if self._queue is not None:
            self._queue.drop_rest()

    def _leave(self, by_tag: bool, cut: bool) -> None:
        """Leaves the current state, by a tag or at the end of the output, which may be ``cut``."""
        if self._state != CALL or self._parser is None or self._call_syntax is None:
            return
        calls = self._parser.end(cut)
        self._add_calls(calls or (), ended=True)
        text = self._parser.rest
        if calls is None and (by_tag or text.strip()):
            # The text contains no call: show it to the user, with its tags.
            end = self._call_syntax.end.text if by_tag else ""
            self._add_text(self._reply.resume(self._call_syntax.start.text + text + end))
        elif text.strip():
            self._add_text(self._reply.resume(text))

    def _add_calls(self, calls: Iterable[CallDelta], ended: bool = False) -> None:
        assert self._limited is not None
        passed = self._limited.add(calls)
        if ended:
            passed += self._limited.rest()
        for delta in passed:
            self._deltas.append(OutputDelta(self.index, "", None, None, call=delta))

    def _in_string(self) -> bool:
        return self._parser is not None and self._parser.in_string

    def _add_text(self, text: str) -> None:
        if text:
            scored = None if self._queue is None else self._queue.take(self._reply.sent)
            self._deltas.append(OutputDelta(self.index, text, scored, None))

    @property
    def _called(self) -> bool:
        return self._limited is not None and self._limited.count > 0

    @property
    def _is_over(self) -> bool:
        """Whether the reply is complete, so that further output is ignored."""
        if self._reply.stopped or self._limited is None:
            return self._reply.stopped
        return self._limited.exceeded or (self._limited.full and self._state != CALL)

    def _end_choice(self, output: TokenOutput) -> None:
        self._add_text(self._reply.interrupt() if self._called else self._reply.finish())
        finish = self.finish_of(output, stopped=self._is_over)
        self.finish = "tool_calls" if self._called and finish == "stop" else finish
        scored = None
        # White space after a call is dropped, and its log-probabilities, too.
        if self._queue is not None and not self._reply.stopped and not self._called:
            scored = self._queue.take_rest()
        self._deltas.append(OutputDelta(self.index, "", scored, self.finish))
