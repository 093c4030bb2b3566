"""The place found is the best of all earlier ones; texts may grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.speculation import lookup as lookups
from chairlift.engine.speculation.lookup import MAX_PLACES, Lookup, continued

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def _alike(text: list[int], place: int, last: list[int]) -> int:
    length = 0
    while length < min(place, len(last)) and text[place - 1 - length] == last[-1 - length]:
        length += 1
    return length


@given(TOKENS, TOKENS, st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(0, 40)))
def test_the_longest_match_is_found(
    text: list[int], last: list[int], shortest: int, more: int, cuts: list[int]
) -> None:
    lookup = Lookup(shortest, shortest + more)
    for cut in sorted(cut for cut in cuts if cut < len(text)):
        lookup.extend(text[:cut])
    lookup.extend(text)
    # A place is followed by a token.
    lengths = {place: _alike(text, place, last) for place in range(1, len(text))}
    places = [place for place, length in lengths.items() if length >= shortest][-MAX_PLACES:]
    match = lookup.find(text, last)
    if not places:
        assert match is None
    else:
        best = max(min(lengths[place], lookup.longest) for place in places)
        assert match is not None
        assert match.length == best == min(lengths[match.place], lookup.longest)
        assert match.place == max(p for p in places if min(lengths[p], lookup.longest) == best)


@given(TOKENS, st.lists(TOKENS, max_size=3), TOKENS, st.integers(1, 4), st.integers(0, 4))
def test_texts_with_the_same_beginning_share_its_index(
    beginning: list[int], ends: list[list[int]], last: list[int], shortest: int, more: int
) -> None:
    shared = Lookup(shortest, shortest + more)
    shared.extend(beginning)
    for end in ends:
        text = beginning + end
        whole = Lookup(shortest, shortest + more)
        parts = Lookup(shortest, shortest + more, shared, len(beginning))
        for lookup in (whole, parts):
            lookup.extend(text)
        assert parts.find(text, last) == whole.find(text, last)


def test_a_long_text_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_INDEXED", 4)
    text, lookup = [*range(20), 0, 1], Lookup(2, 4)
    found = []
    for _ in range(6):
        lookup.extend(text)
        found.append(lookup.find(text, [17, 18]) is not None)
    assert found == [False] * 4 + [True] * 2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 30), st.data())
def test_a_text_goes_on_with_its_last_tokens(
    text: list[int], count: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    tokens = continued(text, place, count)
    period = len(text) - place
    assert tokens == [text[place + i % period] for i in range(count)]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (-1, -1)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="cannot be found"):
        Lookup(shortest, longest)
