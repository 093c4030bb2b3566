"""Limits on the calls of a reply, and parsing of partial arguments."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.chat.call_limits import CallLimits, LimitedCalls
from chairlift.api.chat.json_text import ObjectText, is_complete_object, partial_object
from chairlift.api.text.choice import CallDelta, CallOpening

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('a"\\{}[]é😀\n'), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
objects = st.dictionaries(st.text(st.sampled_from('a"}\\é'), max_size=3), values, max_size=3)
cuts = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def parts(text: str, sizes: list[int]) -> list[str]:
    found = []
    while text:
        size = sizes[len(found) % len(sizes)]
        found.append(text[:size])
        text = text[size:]
    return found


calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.sampled_from(["{}", '{"a": 1}', '{"a": 11}', '{"b": 1}'])),
    max_size=12,
)


@given(calls, st.integers(1, 6), st.integers(1, 3), cuts)
def test_calls_pass_up_to_the_first_that_exceeds_a_limit(
    written: list[tuple[str, str]], max_calls: int, max_repeats: int, sizes: list[int]
) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    expected = []
    for call in written:
        seen[call] += 1
        if len(expected) == max_calls or seen[call] > max_repeats:
            break
        expected.append(call)
    limited = LimitedCalls(CallLimits(max_calls, max_repeats))
    passed: list[CallDelta] = []
    for number, (name, arguments) in enumerate(written):
        passed += limited.add([CallDelta(number, CallOpening(str(number), name), "")])
        for part in parts(arguments, sizes):
            passed += limited.add([CallDelta(number, None, part)])
    passed += limited.rest()
    found = [
        (
            delta.opening.name,
            "".join(d.arguments for d in passed if d.number == delta.number),
        )
        for delta in passed
        if delta.opening is not None
    ]
    assert found == expected
    assert limited.count == len(expected)
    assert limited.exceeded == (len(expected) < len(written))
    assert [delta.number for delta in passed] == sorted(delta.number for delta in passed)


def test_a_new_call_is_passed_on_at_once() -> None:
    limited = LimitedCalls(CallLimits(9, 1))
    limited.add([CallDelta(0, CallOpening("0", "f"), '{"a": 1}')])
    assert limited.add([CallDelta(1, CallOpening("1", "g"), "")])
    assert limited.add([CallDelta(2, CallOpening("2", "f"), '{"a"')]) == []
    assert "".join(d.arguments for d in limited.add([CallDelta(2, None, ": 2")])) == '{"a": 2'
    assert limited.add([CallDelta(2, None, "}")])


@given(objects, st.booleans(), cuts, st.sampled_from(["", "}", "}\n</tool_call>", ' "}{']))
def test_the_end_of_an_object_is_found(
    value: dict[str, Any], ascii: bool, sizes: list[int], after: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    object_text = ObjectText()
    assert "".join(map(object_text.add, parts(text + after, sizes))) == text
    assert object_text.ended
    assert all(is_complete_object(text[:end]) == (end == len(text)) for end in range(len(text) + 1))


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether a value may be the beginning of a complete one."""
    if isinstance(whole, dict) and isinstance(part, dict):
        last = len(part) - 1
        return list(part) == list(whole)[: len(part)] and all(
            part[key] == whole[key] or (place == last and is_beginning(part[key], whole[key]))
            for place, key in enumerate(part)
        )
    if isinstance(whole, list) and isinstance(part, list):
        return part == whole[: len(part)] or (
            0 < len(part) <= len(whole)
            and part[:-1] == whole[: len(part) - 1]
            and is_beginning(part[-1], whole[len(part) - 1])
        )
    if isinstance(whole, str) and isinstance(part, str):
        return whole.startswith(part)
    return type(part) is type(whole) and bool(part == whole)


@given(objects, st.booleans())
def test_a_partial_object_is_a_beginning_of_the_object(value: dict[str, Any], ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    for end in range(len(text)):
        assert is_beginning(partial_object(text[:end]), value), text[:end]


def test_unreadable_beginnings_give_an_empty_object() -> None:
    assert partial_object('{"a": "\\ud83d", "b": "c') == {}
    assert partial_object('{"a": ' + "[" * 5000) == {}
    assert partial_object("") == {}
