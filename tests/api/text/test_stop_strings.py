"""Stop strings: the text ends at the first one, and no part of it is sent."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.fake_engine import byte_tokenizer

from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import TextStream

TOKENIZER = byte_tokenizer()

# Two letters, so that stop strings and near misses are frequent.
texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def truncated(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The text up to the first stop string, and whether there is one."""
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    start, length = min(found)
    return text[: start + length if include else start], True


@given(texts, stops, st.lists(st.integers(0, 99), max_size=8), st.booleans())
def test_text_ends_at_the_first_stop_string_and_nothing_leaks(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(Stops(stops), include)
    expected_text, found = truncated(text, stops, include)
    sent = ""
    for piece in pieces_of(text, cuts):
        sent += matcher.feed(piece)
        assert expected_text.startswith(sent)
        if matcher.stopped:
            break
    if not matcher.stopped:
        sent += matcher.finish()
    assert sent == expected_text
    assert matcher.stopped == found


@given(texts, stops, st.integers(1, 5))
def test_only_possible_beginnings_of_a_stop_string_are_buffered(
    text: str, stops: list[str], size: int
) -> None:
    matcher = StopMatcher(Stops(stops))
    read = sent = 0
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        read += len(piece)
        sent += len(matcher.feed(piece))
        if matcher.stopped:
            return
        buffered = text[sent:read]
        assert (
            not buffered
            or any(stop.startswith(buffered) for stop in stops)
            or _contains(buffered, stops)
        )


def _contains(buffered: str, stops: list[str]) -> bool:
    """Text buffered for one stop string may contain another that begins later."""
    return any(stop in buffered for stop in stops)


def stream(stop: list[str]) -> TextStream:
    detokenizer = TOKENIZER.detokenizer
    detokenizer.add_token(TOKENIZER.encode("a")[0])
    _ = detokenizer.last_segment
    return TextStream(detokenizer, frozenset(), StopMatcher(Stops(stop)))


@given(st.text("aé🙂 ", max_size=12), st.sampled_from([["🙂"], ["é ", "aa"], ["zz"]]))
def test_stop_strings_across_parts_of_characters(text: str, stop: list[str]) -> None:
    expected_text, found = truncated(text, stop, include=False)
    choice = stream(stop)
    sent = ""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        sent += choice.add(token)
        if choice.stopped:
            break
    sent += choice.finish()
    assert sent == expected_text
    assert choice.stopped == found
    assert choice.sent == len(sent)


def test_an_unfinished_character_becomes_a_replacement_character() -> None:
    choice = stream([])
    tokens = TOKENIZER.encode("x🙂", add_special_tokens=False)[:-1]
    sent = "".join(choice.add(token) for token in tokens)
    assert sent == "x"
    assert choice.finish().startswith("\ufffd")


class CountingStops(Stops):
    """Counts the lookups of edges in the automaton."""

    looked_up = 0

    def next(self, state: int, character: str) -> int:
        class Counted(dict[int, int]):
            def get(_, key: int) -> int | None:  # type: ignore[override]  # noqa: N805
                self.looked_up += 1
                return edges.get(key)

        edges = self._edges
        self._edges = Counted()
        try:
            return super().next(state, character)
        finally:
            self._edges = edges


def _fibonacci(length: int) -> str:
    word, last = "ab", "a"
    while len(word) < length:
        word, last = word + last, word
    return word[:length]


NEAR_MISSES = {
    "all but the last": ["a" * (1023 - number) + "b" for number in range(16)],
    "one holds, none fits": ["a" * 1023 + "b", *("c" + "a" * (1000 + i) for i in range(15))],
    "one in two": [("ab" * 512)[number:-1] + "c" for number in range(16)],
    "Fibonacci's": [_fibonacci(1023 - number) + "c" for number in range(16)],
}


@pytest.mark.slow
@pytest.mark.parametrize("stops", NEAR_MISSES.values(), ids=NEAR_MISSES)
@pytest.mark.parametrize("text", ["a" * (1 << 15), "ab" * (1 << 14)], ids=["a", "ab"])
def test_near_misses_of_long_strings_take_linear_time(stops: list[str], text: str) -> None:
    """Counts the automaton's steps, which do not depend on the machine's load."""
    automaton = CountingStops(stops)
    automaton.looked_up = 0  # discard the lookups of its construction
    matcher = StopMatcher(automaton)
    for start in range(0, len(text), 4):
        matcher.feed(text[start : start + 4])
    matcher.finish()
    assert not matcher.stopped
    assert automaton.looked_up <= 2 * len(text)


def test_near_misses_of_long_strings_take_microseconds_a_token() -> None:
    """Matching the strings one by one took milliseconds."""
    matcher = StopMatcher(Stops(NEAR_MISSES["one holds, none fits"]))
    matcher.feed("a" * 1023)
    began = time.thread_time()
    for _ in range(2000):
        matcher.feed("aaaa")
    assert (time.thread_time() - began) / 2000 < 0.0005


@given(
    st.lists(st.text("ab^]-\\🙂", min_size=1, max_size=4), min_size=1, max_size=16),
    st.text("ab^]-\\🙂", max_size=40),
    st.lists(st.integers(0, 99), max_size=8),
)
def test_stop_strings_of_any_characters(stops: list[str], text: str, cuts: list[int]) -> None:
    matcher = StopMatcher(Stops(stops))
    sent = "".join(matcher.feed(piece) for piece in pieces_of(text, cuts) if not matcher.stopped)
    if not matcher.stopped:
        sent += matcher.finish()
    assert (sent, matcher.stopped) == truncated(text, stops, include=False)


def test_the_stop_string_is_known_after_the_end_of_the_text() -> None:
    matcher = StopMatcher(Stops(["STOP"]))
    assert matcher.feed("a STOP b") == "a "
    assert (matcher.finish(), matcher.found) == ("", "STOP")


@given(texts, texts, stops, st.lists(st.integers(0, 99), max_size=4))
def test_a_stop_string_does_not_reach_into_the_next_text(
    first: str, second: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(Stops(stops))
    for text in (first, second):
        sent = "".join(matcher.feed(part) for part in pieces_of(text, cuts) if not matcher.stopped)
        sent += matcher.finish()
        assert (sent, matcher.stopped) == truncated(text, stops, include=False)
        if matcher.stopped:
            return
