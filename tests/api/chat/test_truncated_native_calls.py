"""Truncated calls in the models' native formats arrive as far as they go."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.native_calls import FORMS, block
from support.api.tool_calls import FAMILIES, TOKENIZERS, Family
from support.api.truncated_replies import (
    PROPERTY,
    Model,
    check_truncations,
    chunk_sizes,
    cut_positions,
)

pytestmark = pytest.mark.usefixtures("generous_parse_time")

names = st.sampled_from(["f", "g"])
keys = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
# Texts that end a call, a parameter or a value in some format.
ENDS = ["</function>", "</parameter>", "</invoke>", "}", ")]", '"', "'", "</tool", "\n", "é", "1"]
plain = st.lists(st.sampled_from(ENDS) | st.text("abc 12", max_size=4), max_size=4).map("".join)
flat = st.dictionaries(keys, plain | st.integers() | st.booleans(), max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from(["f", "g"]), flat), min_size=1, max_size=3),
    chunk_sizes,
    cut_positions,
)
def test_a_truncated_native_call_is_the_beginning_of_it(
    family: Family, made: list[tuple[str, dict[str, Any]]], sizes: list[int], cuts: list[float]
) -> None:
    form = FORMS[family.parser]
    model = Model(TOKENIZERS[family.parser])
    text = f"Let me see.\n{block(family.parser, made)}"
    if len(model.read_complete(text).calls) != len(made):
        return  # the format cannot express these values
    check_truncations(model, text, sizes, [form.start.strip()], cuts)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_every_truncation_of_a_reply_in_every_family(family: Family) -> None:
    form = FORMS[family.parser]
    text = f"Let me see.\n{form.start}{form.write('f', {'s': 'é 1', 't': 12})}{form.end} And"
    model = Model(TOKENIZERS[family.parser])
    complete = check_truncations(model, text, [1], [form.start.strip()])
    assert [name for name, _ in complete.calls] == ["f"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_calls_before_the_truncation_arrive(family: Family) -> None:
    model = Model(TOKENIZERS[family.parser])
    text = block(family.parser, [("f", {"s": "é"}), ("g", {"t": "b", "u": "zzz"})])
    cut = model.read(model.tokens(text.partition("zzz")[0]), "length")
    assert [name for name, _ in cut.calls] == ["f", "g"]
    assert json.loads(cut.calls[0][1]) == {"s": "é"}
    assert cut.calls[1][1].startswith('{"t": "b"')
    assert "zzz" not in cut.calls[1][1]
    assert (cut.content, cut.finish) == ("", "length")


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_truncated_in_its_closing_tag(parser: str) -> None:
    """It is complete if nothing but the tag is missing, except if only the tag ends it."""
    form, model = FORMS[parser], Model(TOKENIZERS[parser])
    text = form.start + form.write("f", {"s": "é"})
    tokens = model.tokens(text + form.end)
    for end in range(len(model.tokens(text)), len(tokens) + 1):
        cut = model.read(tokens[:end], "length")
        assert (cut.content, cut.finish) == ("", "length")
        ((name, arguments),) = cut.calls
        ended = arguments.endswith("}")
        assert (name, json.loads(arguments if ended else arguments + "}")) == ("f", {"s": "é"})
        assert ended or parser in ("glm47", "longcat", "minicpm5")
