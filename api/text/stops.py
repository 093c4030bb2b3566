"""Stop strings as an automaton: each character of a text is looked at once, whatever the strings.

Aho and Corasick's. The libraries of it find whole strings only, and do not say how much of one a
text ends with, which a stream must hold back; so this one is ours.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

# A state's edge is found at state << _SHIFT | character.
_SHIFT = 21


class Stops:
    """The automaton of ``strings``, shared by all the texts that it is used on.

    A state is the longest end of a text that a stop string begins with; 0 is the empty one.
    ``depth[state]`` is its length, and ``match[state]`` the length of the longest stop string that
    ends here, 0 if there is none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.depth = [0]
        self.match = [0]
        self._fail = [0]
        self._edges: dict[int, int] = {}
        for string in self.strings:
            self._add(string)
        self._link()
        starts = "".join(re.escape(string[0]) for string in self.strings)
        # Skips what no stop string begins with, at C's speed.
        self._start = re.compile(f"[{starts}]") if starts else None

    def next(self, state: int, character: str) -> int:
        """The state after one more character."""
        code = ord(character)
        while (target := self._edges.get(state << _SHIFT | code)) is None:
            if state == 0:
                return 0
            state = self._fail[state]
        return target

    def skip(self, text: str, position: int) -> int:
        """From state 0, the next position at which a stop string may begin; else the text's end."""
        found = None if self._start is None else self._start.search(text, position)
        return len(text) if found is None else found.start()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            edge = state << _SHIFT | ord(character)
            target = self._edges.get(edge)
            if target is None:
                target = self._edges[edge] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
                self._fail.append(0)
            state = target
        self.match[state] = len(string)

    def _link(self) -> None:
        """Finds where each state goes on when a character does not fit."""
        children: list[list[tuple[str, int]]] = [[] for _ in self.depth]
        for edge, target in self._edges.items():
            children[edge >> _SHIFT].append((chr(edge & (1 << _SHIFT) - 1), target))
        queue = deque(target for _, target in children[0])
        while queue:
            state = queue.popleft()
            for character, target in children[state]:
                fail = self._fail[target] = self.next(self._fail[state], character)
                self.match[target] = self.match[target] or self.match[fail]
                queue.append(target)


class StopMatcher:
    """Cuts a text that arrives in pieces before the first stop string in it.

    The first is the one that begins first, however the text is cut into pieces; of two that begin
    together, the shorter. Text that may still turn out to be part of it is held back. ``found`` is
    the string itself, once it was.
    """

    def __init__(self, stops: Stops, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        # What is not given out yet: what the state stands for, or a match and what it waits for.
        self._held = ""
        # Where the best match begins in the held text, and where it ends.
        self._best: tuple[int, int] | None = None
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def feed(self, piece: str) -> str:
        """Takes the next piece; returns the text that is now certain. None follows a stop."""
        stops, state = self._stops, self._state
        if not stops.strings:
            return piece
        text = self._held + piece
        position = len(self._held)
        while position < len(text):
            if state == 0 and (position := stops.skip(text, position)) == len(text):
                break
            state = stops.next(state, text[position])
            position += 1
            begin = position - stops.match[state]
            if begin < position and (self._best is None or begin < self._best[0]):
                self._best = begin, position
            # Nothing that may still come begins before it.
            if self._best is not None and self._best[0] <= position - stops.depth[state]:
                return self._stop(text)
        self._state = state
        pending = len(text) - stops.depth[state]
        self._held = text[pending:]
        if self._best is not None:
            self._best = self._best[0] - pending, self._best[1] - pending
        return text[:pending]

    def finish(self) -> str:
        """The rest, when no more pieces come."""
        text, self._held = self._held, ""
        # A stop string may lie in what was held for one that would have begun before it.
        return text if self._best is None else self._stop(text)

    def _stop(self, text: str) -> str:
        assert self._best is not None
        begin, end = self._best
        self._held = ""
        self.found = text[begin:end]
        return text[: end if self._include else begin]
