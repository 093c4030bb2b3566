"""Tells a reply's tokens apart: text for the user, thoughts, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from chairlift.api.chat_format import CALL, Passage
from chairlift.api.text import Detokenizer


class Segment(NamedTuple):
    """Text, and what it is. Where that changes there is a segment, be it empty."""

    state: str
    text: str


@dataclass(frozen=True)
class Rules:
    """What a reply begins as, and by which tags it becomes something else.

    ``jumps`` are the tags that are tokens, ``machine`` finds the others in the text of ``spelt``
    states. ``hidden`` tokens have no text, but in calls, whose parsers want all of it but what
    ends the reply.
    """

    initial: str
    jumps: Mapping[str, Mapping[int, str]]
    spelt: frozenset[str]
    machine: Any
    hidden: frozenset[int]
    hidden_in_calls: frozenset[int]

    def splitter(self, detokenizer: Callable[[], Detokenizer]) -> Splitter:
        """Splits one reply; ``detokenizer`` gives a fresh one."""
        return Splitter(self, detokenizer)


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
    spelt = []
    for state, tag, target in passages:
        if tag.token is not None:
            jumps[state][tag.token] = target
        elif tag.text:
            edges[state].append((tag.text, target))
            spelt.append(tag.text)
    shown = {token for token, text in special.items() if any(text in tag for tag in spelt)}
    hidden = frozenset() if show_special else frozenset(special).union(ends).difference(shown)
    states = frozenset(edges)
    for state in {initial, *jumps, *(target for _, _, target in passages)}:
        edges.setdefault(state, [])
    return Rules(initial, dict(jumps), states, TextStateMachine(edges), hidden, ends)


class Splitter:
    """Splits one reply, whose tokens come one by one."""

    def __init__(self, rules: Rules, detokenizer: Callable[[], Detokenizer]) -> None:
        self._rules = rules
        self._new_detokenizer = detokenizer
        # TextStateMachine's.
        self._position: Any = None
        self._enter(rules.initial)

    def add(self, token: int) -> list[Segment]:
        """Takes the next token; returns what is now certain."""
        target = self._rules.jumps.get(self.state, {}).get(token)
        if target is not None:
            segments = self.finish()
            self._enter(target)
            segments.append(Segment(target, ""))
            return segments
        if token in self._hidden:
            return []
        self._detokenizer.add_token(token)
        return self._split(self._detokenizer.last_segment)

    def finish(self) -> list[Segment]:
        """The rest, when no more tokens come, or none that the text goes on with."""
        self._detokenizer.finalize()
        segments = self._split(self._detokenizer.last_segment)
        self._position, rest, state = TextStateMachine.flush(self._position)
        if rest:
            segments.append(Segment(state, rest))
        return segments

    def _enter(self, state: str) -> None:
        self.state = state
        self._detokenizer = self._new_detokenizer()
        self._position = self._rules.machine.make_state(state)

    @property
    def _hidden(self) -> frozenset[int]:
        return self._rules.hidden_in_calls if self.state == CALL else self._rules.hidden

    def _split(self, text: str) -> list[Segment]:
        if not text:
            return []
        if self.state not in self._rules.spelt:
            return [Segment(self.state, text)]
        self._position, parts = TextStateMachine.split(self._position, text)
        self.state = parts[-1][0]
        first, *others = [Segment(*part) for part in parts]
        return [first, *others] if first.text else others
