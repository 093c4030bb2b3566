"""Finds stop strings with an Aho-Corasick automaton, in linear time for any number of strings.

Libraries of this algorithm report complete matches only. A stream also needs to know how much of a
stop string the text ends with, because it must not send that yet.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence

# A state's edge is found at state << _SHIFT | character.
_SHIFT = 21


class Stops:
    """The automaton of ``strings``. It is immutable, so that many texts can share it.

    A state stands for the longest suffix of the text so far that is a prefix of a stop string; 0
    stands for the empty suffix. ``depth[state]`` is the length of that suffix, and ``match[state]``
    the length of the longest stop string that ends here, or 0.
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
        # Skips characters that no stop string begins with, at the speed of C.
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
        """In state 0, the next position where a stop string may begin, or the text's length."""
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
        """Sets the failure link of each state: where to continue when no edge fits."""
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
    """Cuts a text that arrives in pieces before its first stop string; with ``include``, after it.

    The first stop string is the one that begins first; if two begin at the same place, the shorter.
    This does not depend on how the text is split into pieces. Text that may become part of a stop
    string is buffered. ``found`` is the stop string, or None.

    A stop string that ends within the text of the first ``min_tokens`` tokens is ignored, as in
    vLLM. For this, call ``begin_token`` before the text of every token.
    """

    def __init__(self, stops: Stops, include: bool = False, min_tokens: int = 0) -> None:
        self._stops = stops
        self._include = include
        self._min_tokens = min_tokens
        self._tokens = 0
        self._read = 0
        # Stop strings that end within this many characters are ignored.
        self._ignored: float = math.inf if min_tokens else 0
        self._state = 0
        # Text not returned yet: a possible beginning of a stop string, perhaps after a match that
        # waits for whether an earlier one completes.
        self._pending = ""
        # Begin and end of the best match in the pending text.
        self._best: tuple[int, int] | None = None
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def begin_token(self, pending: int = 0) -> None:
        """Counts a token; ``pending`` characters before its own have not been fed yet."""
        self._tokens += 1
        if self._tokens == self._min_tokens + 1:
            self._ignored = self._read + pending

    def feed(self, piece: str) -> str:
        """Takes the next piece; returns the text that is certain now. Do not call after a stop."""
        stops, state = self._stops, self._state
        if not stops.strings:
            return piece
        text = self._pending + piece
        position = len(self._pending)
        ignored = self._ignored - self._read + position
        self._read += len(piece)
        while position < len(text):
            if state == 0 and (position := stops.skip(text, position)) == len(text):
                break
            state = stops.next(state, text[position])
            position += 1
            begin = position if position <= ignored else position - stops.match[state]
            if begin < position and (self._best is None or begin < self._best[0]):
                self._best = begin, position
            # No match that may still complete begins before this one.
            if self._best is not None and self._best[0] <= position - stops.depth[state]:
                return self._stop(text)
        self._state = state
        certain = len(text) - stops.depth[state]
        self._pending = text[certain:]
        if self._best is not None:
            self._best = self._best[0] - certain, self._best[1] - certain
        return text[:certain]

    def finish(self) -> str:
        """Returns the remaining text at the end of a text. The next piece begins another."""
        text, self._pending = self._pending, ""
        self._state = 0
        if self._tokens > self._min_tokens:
            self._ignored = self._read  # what was pending then is no part of the text
        # A match may have waited for a longer stop string that began before it.
        return text if self._best is None else self._stop(text)

    def _stop(self, text: str) -> str:
        assert self._best is not None
        (begin, end), self._best = self._best, None
        self._pending = ""
        self.found = text[begin:end]
        return text[: end if self._include else begin]
