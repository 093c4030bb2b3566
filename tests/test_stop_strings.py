"""Stop strings: whatever the tokens, the text ends at the first one and none of it leaks before."""

from __future__ import annotations

import itertools

from fake_engine import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.text import StopMatcher, TextStream

TOKENIZER = byte_tokenizer()

# Two letters, so that stop strings and near misses are frequent.
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    start, length = min(found)
    return text[: start + length if include else start], True


@given(texts, stops, st.lists(st.integers(0, 99), max_size=8), st.booleans())
def test_text_ends_at_the_first_stop_string_and_nothing_leaks(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    wanted, found = expected(text, stops, include)
    sent = ""
    for piece in pieces_of(text, cuts):
        sent += matcher.feed(piece)
        assert wanted.startswith(sent)
        if matcher.stopped:
            break
    if not matcher.stopped:
        sent += matcher.finish()
    assert sent == wanted
    assert matcher.stopped == found


@given(texts, stops, st.integers(1, 5))
def test_no_more_is_held_back_than_could_be_a_stop_string(
    text: str, stops: list[str], size: int
) -> None:
    matcher = StopMatcher(stops)
    read = sent = 0
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        read += len(piece)
        sent += len(matcher.feed(piece))
        if matcher.stopped:
            return
        held = text[sent:read]
        assert not held or any(stop.startswith(held) for stop in stops) or _contains(held, stops)


def _contains(held: str, stops: list[str]) -> bool:
    """Held for one stop string, it may hold another that begins later."""
    return any(stop in held for stop in stops)


def stream(stop: list[str]) -> TextStream:
    detokenizer = TOKENIZER.detokenizer
    detokenizer.add_token(TOKENIZER.encode("a")[0])
    _ = detokenizer.last_segment
    return TextStream(detokenizer, frozenset(), StopMatcher(stop))


@given(st.text("aé🙂 ", max_size=12), st.sampled_from([["🙂"], ["é ", "aa"], ["zz"]]))
def test_tokens_that_are_parts_of_characters(text: str, stop: list[str]) -> None:
    wanted, found = expected(text, stop, include=False)
    choice = stream(stop)
    sent = ""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        sent += choice.add(token)
        if choice.stopped:
            break
    sent += choice.finish()
    assert sent == wanted
    assert choice.stopped == found
    assert choice.sent == len(sent)


def test_an_unfinished_character_is_shown_as_such() -> None:
    choice = stream([])
    tokens = TOKENIZER.encode("x🙂", add_special_tokens=False)[:-1]
    sent = "".join(choice.add(token) for token in tokens)
    assert sent == "x"
    assert choice.finish().startswith("\ufffd")
