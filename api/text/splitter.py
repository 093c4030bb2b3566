"""Splits a reply's tokens into text for the user, thoughts and calls, at the model's tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from chairlift.api.text.chat_format import CALL, Transition
from chairlift.api.text.stream import Detokenizer


class Segment(NamedTuple):
    """Text in one state. Every change of state yields a segment, even without text."""

    state: str
    text: str


@dataclass(frozen=True)
class ReplyRules:
    """How a reply begins, and which of its tokens have no text.

    Attributes:
        initial: the state in which a reply begins.
        hidden: the tokens that have no text outside of calls.
        ends: the tokens with which the model ends a reply. In calls only these are hidden, because
            parsers need all other special tokens.
    """

    initial: str
    hidden: frozenset[int]
    ends: frozenset[int]

    def hidden_in(self, state: str) -> frozenset[int]:
        """The tokens that have no text in a state."""
        return self.ends if state == CALL else self.hidden


@dataclass(frozen=True)
class Rules(ReplyRules):
    """The tags that change the state of a reply.

    Attributes:
        token_tags: for each state, maps a tag that is a single token to the next state.
        text_tags: for each state, the other tags, which ``machine`` finds in the text.
        machine: mlx-lm's TextStateMachine.
    """

    token_tags: Mapping[str, Mapping[int, str]]
    text_tags: Mapping[str, Sequence[str]]
    machine: Any

    def splitter(
        self,
        detokenizer: Callable[[], Detokenizer],
        in_string: Callable[[], bool] | None = None,
    ) -> Splitter:
        """A splitter for one reply.

        Args:
            detokenizer: makes a fresh detokenizer.
            in_string: returns whether the segments so far end inside a string of a call, where a
                tag is only text. None: a tag always ends the call.
        """
        return Splitter(self, detokenizer, in_string)


def rules(
    initial: str,
    transitions: Iterable[Transition],
    special: Mapping[int, str],
    ends: frozenset[int],
    show_special: bool,
) -> Rules:
    """Builds the rules of a reply.

    A tag of several tokens is found by its text, so special tokens that are part of one are not
    hidden.

    Args:
        initial: the state in which the reply begins.
        transitions: the tags of each state.
        special: maps special tokens to their texts.
        ends: the tokens that end a reply.
        show_special: hide no token.
    """
    token_tags: dict[str, dict[int, str]] = defaultdict(dict)
    edges: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for state, tag, target in transitions:
        if tag.token is not None:
            token_tags[state][tag.token] = target
        elif tag.text:
            edges[state].append((tag.text, target))
    text_tags = {state: [text for text, _ in found] for state, found in edges.items()}
    tags = [tag for found in text_tags.values() for tag in found]
    shown = {token for token, text in special.items() if any(text in tag for tag in tags)}
    hidden = frozenset() if show_special else frozenset(special).union(ends).difference(shown)
    for state in {initial, *token_tags, *(target for _, _, target in transitions)}:
        edges.setdefault(state, [])
    return Rules(initial, hidden, ends, dict(token_tags), text_tags, TextStateMachine(edges))


class Splitter:
    """Splits one reply, token by token.

    NOTE: handle each segment before asking for the next one, since ``in_string`` depends on it.

    ``in_tag`` is True if the reply was cut at a possible beginning of a tag, which is left out.
    """

    def __init__(
        self,
        rules: Rules,
        detokenizer: Callable[[], Detokenizer],
        in_string: Callable[[], bool] | None,
    ) -> None:
        self.in_tag = False
        self._rules = rules
        self._new_detokenizer = detokenizer
        self._in_string = in_string
        # State of mlx-lm's TextStateMachine.
        self._position: Any = None
        self._enter(rules.initial)

    def add(self, token: int) -> Iterator[Segment]:
        """Takes the next token; yields the segments that are certain now."""
        target = self._rules.token_tags.get(self.state, {}).get(token)
        if target is not None:
            yield from self.finish()
            if not self._is_text:
                self._enter(target)
                yield Segment(target, "")
                return
            self._enter(self.state)
        if token in self._rules.hidden_in(self.state):
            return
        self._detokenizer.add_token(token)
        yield from self._split(self._detokenizer.last_segment)

    def finish(self, cut: bool = False) -> Iterator[Segment]:
        """Yields the remaining segments, at the end of the reply or before a tag that is a token.

        If ``cut``, the model had not ended the reply. Then a possible beginning of a tag is left
        out, and so is an incomplete character of a call.
        """
        self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        yield from self._split(text.rstrip("\ufffd") if cut and self.state == CALL else text)
        self._position, rest, state = TextStateMachine.flush(self._position)
        if cut and (begun := self._begun_tag(rest)):
            self.in_tag = True
            rest = rest[:-begun]
        if rest:
            yield Segment(state, rest)

    @property
    def pending_chars(self) -> int:
        """The number of characters that are buffered because they may begin a tag."""
        return len(self._position[-1])

    def _enter(self, state: str) -> None:
        self.state = state
        self._detokenizer = self._new_detokenizer()
        self._position = self._rules.machine.make_state(state)

    @property
    def _is_text(self) -> bool:
        """Whether a tag at this place is text, because it is inside a string of a call."""
        return self.state == CALL and self._in_string is not None and self._in_string()

    def _is_stepwise(self, text: str) -> bool:
        """Whether a tag in ``text`` may be inside a string of a call."""
        if self._in_string is None:
            return False
        return self.state == CALL or len(TextStateMachine.split(self._position, text)[1]) > 1

    def _begun_tag(self, text: str) -> int:
        """The number of characters at the end of ``text`` that may begin a tag."""
        tags = self._rules.text_tags.get(self.state, ())
        sizes = (size for tag in tags for size in range(1, len(tag)) if text.endswith(tag[:size]))
        return max(sizes, default=0)

    def _split(self, text: str) -> Iterator[Segment]:
        if text and self.state not in self._rules.text_tags:
            yield Segment(self.state, text)
            return
        ready = ""
        # If a tag may be part of a string, split character by character: the text before the tag
        # must be handled before ``in_string`` is called.
        for part in text if not text or self._is_stepwise(text) else (text,):
            read = self._position[-1] + part
            self._position, (first, *others) = TextStateMachine.split(self._position, part)
            ready += first[1]
            if not others:
                continue
            if ready:
                yield Segment(self.state, ready)
            ready = ""
            if self._is_text:
                self._position = self._rules.machine.make_state(self.state)
                ready = read[len(first[1]) :]
                continue
            for segment in others:
                yield Segment(*segment)
            self.state = self._position[0]
        if ready:
            yield Segment(self.state, ready)
