"""Truncated JSON calls, and text that only looks like a tag."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import TOKENIZER
from support.api.fake_engine import byte_tokenizer
from support.api.tool_calls import JSON, PYTHONIC
from support.api.truncated_replies import (
    PROPERTY,
    Model,
    check_truncations,
    chunk_sizes,
    cut_positions,
)

from chairlift.api.text.chat_format import ThinkTags

TAG = "<tool_call>"
UNTOKENIZED = TOKENIZER  # in this vocabulary, the tags are not tokens
CONSTRAINED = [  # models whose calls a grammar constrains
    Model(tokenizer, (("tool_choice", choice), ("parallel_tool_calls", parallel)))
    for tokenizer in (UNTOKENIZED, JSON, PYTHONIC)
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


def json_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@PROPERTY
@given(st.sampled_from(CONSTRAINED), objects, st.booleans(), chunk_sizes, cut_positions)
def test_a_truncated_json_call_has_the_beginning_of_its_arguments(
    model: Model, arguments: dict[str, Any], ascii: bool, sizes: list[int], cuts: list[float]
) -> None:
    encoded = json.dumps(arguments, ensure_ascii=ascii)
    if model.tokenizer is JSON:  # its strings cannot contain the tag, which is a token
        encoded = encoded.replace("tool_call>", "tool_call >")
    text = json_call("f", encoded)
    complete = check_truncations(model, text, sizes, [TAG, "</tool"], cuts)
    assert complete.calls == [["f", encoded]]
    assert (complete.content, complete.finish) == ("", "tool_calls")


@PROPERTY
@given(
    objects,
    objects,
    chunk_sizes,
    st.sampled_from(["", "So: ", "a < b\n", "<tool_cal ", "é\n\n"]),
    cut_positions,
)
def test_text_and_two_calls_of_a_model_without_a_format(
    one: dict[str, Any], two: dict[str, Any], sizes: list[int], before: str, cuts: list[float]
) -> None:
    first, second = json.dumps(one, ensure_ascii=False), json.dumps(two)
    text = f"{before}{json_call('f', first)}\n{json_call('g', second)}"
    complete = check_truncations(Model(UNTOKENIZED), text, sizes, [TAG, "</tool"], cuts)
    assert complete.calls == [["f", first], ["g", second]]
    assert complete.content == before.rstrip()


@pytest.mark.slow
def test_half_a_surrogate_pair_and_unusual_numbers() -> None:
    for arguments in ('{"s": "\\ud83d"}', '{"s": 1e999}', '{"s": -0.10, "t": 1E+5}'):
        for model in CONSTRAINED:
            complete = check_truncations(model, json_call("f", arguments), [1], [TAG])
            assert complete.calls == [["f", arguments]]


def test_a_string_that_contains_the_tag() -> None:
    arguments = json.dumps({"s": "a</tool_call>b"})
    for sizes in ([1], [100]):
        complete = CONSTRAINED[2].read_complete(json_call("f", arguments), sizes)
        assert complete.calls == [["f", arguments]]


# Text that only looks like a tag

THINKING = Model(byte_tokenizer(), tags=ThinkTags("<think>", "</think>"))


@pytest.mark.parametrize("tokens", [1, 3, 100])
@pytest.mark.parametrize("before", ["", "a", "a \n", "a <", "<<", "<tool_calm "])
def test_the_beginning_of_a_tag_is_text_if_the_reply_ends_there(before: str, tokens: int) -> None:
    for size in range(1, len(TAG)):
        text = before + TAG[:size]
        for model in (Model(UNTOKENIZED), THINKING):
            reply = model.read_complete(text, [tokens], logprobs=True)
            assert (reply.content, reply.finish) == (text, "stop")
            assert reply.scored == len(model.tokens(text))
            cut = model.read(model.tokens(text), "length", [tokens], logprobs=True)
            assert (cut.content, cut.finish) == (before.rstrip(), "length")
            assert cut.scored == len(cut.content)


def test_a_tag_at_the_end_of_a_reply_is_not_text() -> None:
    for model in (Model(UNTOKENIZED), Model(JSON), Model(PYTHONIC), *CONSTRAINED):
        start = "<|tool_call_start|>" if model == Model(PYTHONIC) else TAG
        foreign = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
        tokens = model.tokens(f"Hi {start}\n")
        for ended_by in (None, foreign, model.tokenizer.eos_token_id):
            reply = model.read(tokens, "stop", ended_by=ended_by, logprobs=True)
            assert (reply.content, reply.calls, reply.finish) == ("Hi", [], "stop")
            assert reply.scored == 2


def test_the_tags_of_a_thought_are_truncated_as_those_of_calls() -> None:
    text = f"<think>a < b</think>\n\nSo: {json_call('f', '{}')}"
    for size in (1, 5):
        complete = check_truncations(THINKING, text, [size], [TAG, "<think>", "</think"])
        assert (complete.reasoning, complete.content, complete.calls) == (
            "a < b",
            "So:",
            [["f", "{}"]],
        )
