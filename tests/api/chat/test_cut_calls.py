"""JSON calls that are cut, and text that only looks like a tag."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import TOKENIZER
from support.api.cut_reading import PROPERTY, Model, check_cuts, chunks, places
from support.api.fake_engine import byte_tokenizer
from support.api.tool_calls import JSON, PYTHONIC

from chairlift.api.text.chat_format import ThinkTags

# JSON calls, constrained by a grammar

TAG = "<tool_call>"
SPELT = TOKENIZER  # its tags are no tokens
HELD = [
    Model(tokenizer, (("tool_choice", choice), ("parallel_tool_calls", parallel)))
    for tokenizer in (SPELT, JSON, PYTHONIC)
    for choice, parallel in (("required", True), ("required", False))
]
HARD = [
    *('"', "\\", "}", "{", "]", "}}\n</tool_", "</tool_call>", "<tool_call>", "\n</tool_call>\n"),
    *("é", "😀", "\u2028", "\ufffd", '", "', '"}', "\\u00", "<", "</", " ", "\x7f"),
]
texts = st.lists(st.sampled_from(HARD) | st.text(max_size=3), max_size=4).map("".join)
values = st.recursive(
    texts | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, values, max_size=3)
befores = st.sampled_from(["", "So: ", "a < b\n", "<tool_cal ", "é\n\n"])


def form(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@PROPERTY
@given(st.sampled_from(HELD), objects, st.booleans(), chunks, places)
def test_a_cut_call_in_json_has_a_beginning_of_its_arguments(
    model: Model, arguments: dict[str, Any], ascii: bool, sizes: list[int], cuts: list[float]
) -> None:
    encoded = json.dumps(arguments, ensure_ascii=ascii)
    if model.tokenizer is JSON:  # no string may hold what is a token there
        encoded = encoded.replace("tool_call>", "tool_call >")
    text = form("f", encoded)
    whole = check_cuts(model, text, sizes, [TAG, "</tool"], cuts)
    assert whole.calls == [["f", encoded]]
    assert (whole.content, whole.finish) == ("", "tool_calls")


@PROPERTY
@given(
    objects,
    objects,
    chunks,
    st.sampled_from(["", "So: ", "a < b\n", "<tool_cal ", "é\n\n"]),
    places,
)
def test_text_and_two_calls_of_a_model_without_a_format(
    one: dict[str, Any], two: dict[str, Any], sizes: list[int], before: str, cuts: list[float]
) -> None:
    first, second = json.dumps(one, ensure_ascii=False), json.dumps(two)
    text = f"{before}{form('f', first)}\n{form('g', second)}"
    whole = check_cuts(Model(SPELT), text, sizes, [TAG, "</tool"], cuts)
    assert whole.calls == [["f", first], ["g", second]]
    assert whole.content == before.rstrip()


def test_half_a_surrogate_pair_and_numbers_as_they_are_written() -> None:
    for arguments in ('{"s": "\\ud83d"}', '{"s": 1e999}', '{"s": -0.10, "t": 1E+5}'):
        for model in HELD:
            whole = check_cuts(model, form("f", arguments), [1], [TAG])
            assert whole.calls == [["f", arguments]]


def test_a_string_that_spells_the_tags_token() -> None:
    arguments = json.dumps({"s": "a</tool_call>b"})
    for sizes in ([1], [100]):
        whole = HELD[2].reads(form("f", arguments), sizes)
        assert whole.calls == [["f", arguments]]


# What only looks like a tag

THINKS = Model(byte_tokenizer(), tags=ThinkTags("<think>", "</think>"))


@pytest.mark.parametrize("tokens", [1, 3, 100])
@pytest.mark.parametrize("before", ["", "a", "a \n", "a <", "<<", "<tool_calm "])
def test_the_beginning_of_a_tag_is_text_if_the_model_ends_there(before: str, tokens: int) -> None:
    for size in range(1, len(TAG)):
        text = before + TAG[:size]
        for model in (Model(SPELT), THINKS):
            reply = model.reads(text, [tokens], logprobs=True)
            assert (reply.content, reply.finish) == (text, "stop")
            assert reply.scored == len(model.tokens(text))
            cut = model.read(model.tokens(text), "length", [tokens], logprobs=True)
            assert (cut.content, cut.finish) == (before.rstrip(), "length")
            assert cut.scored == len(cut.content)


def test_a_tag_at_the_end_of_a_reply_is_not_text() -> None:
    for model in (Model(SPELT), Model(JSON), Model(PYTHONIC), *HELD):
        start = "<|tool_call_start|>" if model == Model(PYTHONIC) else TAG
        foreign = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
        tokens = model.tokens(f"Hi {start}\n")
        for ended_by in (None, foreign, model.tokenizer.eos_token_id):
            reply = model.read(tokens, "stop", ended_by=ended_by, logprobs=True)
            assert (reply.content, reply.calls, reply.finish) == ("Hi", [], "stop")
            assert reply.scored == 2


def test_the_tags_of_a_thought_are_cut_as_those_of_calls() -> None:
    text = f"<think>a < b</think>\n\nSo: {form('f', '{}')}"
    for size in (1, 5):
        whole = check_cuts(THINKS, text, [size], [TAG, "<think>", "</think"])
        assert (whole.reasoning, whole.content, whole.calls) == ("a < b", "So:", [["f", "{}"]])
