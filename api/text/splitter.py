"""Tells a reply's tokens apart: text for the user, thoughts, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from chairlift.api.text.chat_format import CALL, Passage
from chairlift.api.text.stream import Detokenizer


class Segment(NamedTuple):
    """Text, and what it is. Where that changes there is a segment, be it empty."""

    state: str
    text: str


@dataclass(frozen=True)
class Rules:
    """What a reply begins as, and by which tags it becomes something else.

    ``jumps`` are the tags that are tokens; ``machine`` finds the others, ``spelt``, in the text of
    their states. ``hidden`` tokens have no text, except in calls, whose parsers want all of it but
    ``ends``, the tokens by which the model ends a reply.
    """

    initial: str
    jumps: Mapping[str, Mapping[int, str]]
    spelt: Mapping[str, Sequence[str]]
    machine: Any
    hidden: frozenset[int]
    ends: frozenset[int]

    def splitter(
        self,
        detokenizer: Callable[[], Detokenizer],
        in_string: Callable[[], bool] | None = None,
    ) -> Splitter:
        """Splits one reply.

        Args:
            detokenizer: gives a fresh one.
            in_string: whether the segments so far end inside a string of a call, where no tag ends
                the call. None: a tag always does.
        """
        return Splitter(self, detokenizer, in_string)


def rules(
    initial: str,
    passages: Iterable[Passage],
    special: Mapping[int, str],
    ends: frozenset[int],
    show_special: bool,
) -> Rules:
    """The rules for these passages.

    ``special`` are the special tokens and their texts, ``ends`` those that end a reply. Tags that
    are several tokens are found by their text, so the special ones among those are not hidden.
    """
    jumps: dict[str, dict[int, str]] = defaultdict(dict)
    edges: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for state, tag, target in passages:
        if tag.token is not None:
            jumps[state][tag.token] = target
        elif tag.text:
            edges[state].append((tag.text, target))
    spelt = {state: [text for text, _ in found] for state, found in edges.items()}
    tags = [tag for found in spelt.values() for tag in found]
    shown = {token for token, text in special.items() if any(text in tag for tag in tags)}
    hidden = frozenset() if show_special else frozenset(special).union(ends).difference(shown)
    for state in {initial, *jumps, *(target for _, _, target in passages)}:
        edges.setdefault(state, [])
    return Rules(initial, dict(jumps), spelt, TextStateMachine(edges), hidden, ends)


class Splitter:
    """Splits one reply, whose tokens come one by one.

    Each segment is to be read before the next one is asked for. ``in_tag``: the reply was cut where
    its text may have been the beginning of a tag; that text is left out.
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
        # TextStateMachine's.
        self._position: Any = None
        self._enter(rules.initial)

    def add(self, token: int) -> Iterator[Segment]:
        """Takes the next token; returns what is now certain."""
        target = self._rules.jumps.get(self.state, {}).get(token)
        if target is not None:
            yield from self.finish()
            if not self._is_text:
                self._enter(target)
                yield Segment(target, "")
                return
            self._enter(self.state)
        if token in self._hidden:
            return
        self._detokenizer.add_token(token)
        yield from self._split(self._detokenizer.last_segment)

    def finish(self, cut: bool = False) -> Iterator[Segment]:
        """The rest, when no more tokens come, or none that the text goes on with.

        ``cut``: the model had not ended the reply. What may be the beginning of a tag is left out
        then, and the first bytes of a character of a call.
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
    def held(self) -> int:
        """Characters of the text that wait, since a tag may begin with them."""
        return len(self._position[-1])

    def _enter(self, state: str) -> None:
        self.state = state
        self._detokenizer = self._new_detokenizer()
        self._position = self._rules.machine.make_state(state)

    @property
    def _hidden(self) -> frozenset[int]:
        return self._rules.ends if self.state == CALL else self._rules.hidden

    @property
    def _is_text(self) -> bool:
        """Whether a tag that comes now is not one, but part of a call's string."""
        return self.state == CALL and self._in_string is not None and self._in_string()

    def _begun_tag(self, text: str) -> int:
        """How many characters at a text's end may be a tag's first ones."""
        tags = self._rules.spelt.get(self.state, ())
        sizes = (size for tag in tags for size in range(1, len(tag)) if text.endswith(tag[:size]))
        return max(sizes, default=0)

    def _split(self, text: str) -> Iterator[Segment]:
        if text and self.state not in self._rules.spelt:
            yield Segment(self.state, text)
            return
        ready = ""
        # Where a tag may be part of a string, the text before it is to be read first.
        for part in text if self._in_string is not None or not text else (text,):
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
