"""Prompt lookup: finds what followed the last tokens of a sequence earlier in a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

# Earlier places that are compared, the latest first.
MAX_PLACES = 8
# Tokens that one call of ``extend`` indexes: the step waits for it, about a microsecond a token.
MAX_INDEXED = 8192


class LookupMatch(NamedTuple):
    """An earlier place whose tokens before it are a sequence's last ones.

    Attributes:
        place: the number of the token that follows there.
        length: how many tokens before it are alike, up to ``Lookup.longest``.
    """

    place: int
    length: int


class Lookup:
    """An index of the tokens of one text, which may grow.

    Args:
        shortest: tokens that have to be alike, at least 1.
        longest: a match of this many tokens is as good as a longer one.
        beginning: the index of the text's first tokens, which other texts may share.
        begun: the number of these tokens.
    """

    def __init__(
        self, shortest: int, longest: int, beginning: Lookup | None = None, begun: int = 0
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"matches of {shortest} to {longest} tokens cannot be found")
        self.shortest = shortest
        self.longest = longest
        self._beginning = beginning
        # The first place in this index, and not in ``beginning``.
        self._first = max(shortest, begun)
        # For each run of ``shortest`` tokens, the place after its latest occurrence, and for each
        # place the one before with the same run; 0: none.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []

    def extend(self, text: Sequence[int]) -> None:
        """Indexes a text that begins with the one before, or its next ``MAX_INDEXED`` tokens.

        The text's last token is followed by none.
        """
        size = self.shortest
        start = self._first + len(self._earlier)
        for place in range(start, min(len(text), start + MAX_INDEXED)):
            run = tuple(text[place - size : place])
            self._earlier.append(self._latest.get(run, 0))
            self._latest[run] = place

    def find(self, text: Sequence[int], last: Sequence[int]) -> LookupMatch | None:
        """The place in the indexed text whose tokens before it are most like ``last``.

        Of equally good ones it is the latest; None if not even ``shortest`` tokens are alike.

        Args:
            text: the text, as given to ``extend``.
            last: the tokens before the wanted one; only the last ``longest`` matter.
        """
        size = self.shortest
        if len(last) < size:
            return None
        best: LookupMatch | None = None
        for place in islice(self._places(tuple(last[-size:])), MAX_PLACES):
            length = _alike(text, place, last, self.longest)
            if best is None or length > best.length:
                best = LookupMatch(place, length)
            if length == self.longest:
                break
        return best

    def _places(self, run: tuple[int, ...]) -> Iterator[int]:
        """Yields the places after the occurrences of a run of ``shortest`` tokens, latest first."""
        place = self._latest.get(run, 0)
        while place:
            yield place
            place = self._earlier[place - self._first]
        if self._beginning is not None:
            yield from self._beginning._places(run)


def continued(text: Sequence[int], place: int, count: int) -> list[int]:
    """The ``count`` tokens from ``place`` on; at its end the text is continued by the same tokens.

    So a loop goes on, although its next round is not in the text yet.
    """
    found = list(text[place : place + count])
    period = len(found)
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def _alike(text: Sequence[int], place: int, last: Sequence[int], longest: int) -> int:
    """How many tokens before ``place`` are those at the end of ``last``."""
    most = min(place, len(last), longest)
    length = 0
    while length < most and text[place - 1 - length] == last[-1 - length]:
        length += 1
    return length
