"""Free calls in the models' native formats are streamed as they form, whatever the chunks."""

from __future__ import annotations

import json
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.native_calls import FORMS, block
from support.api.tool_calls import FAMILIES, TOKENIZERS, Family
from support.api.truncated_replies import (
    PROPERTY,
    Model,
    ParsedReply,
    chunk_sizes,
    reading,
    vocabulary,
)

from chairlift.api.chat.choice import DialogueChoice
from chairlift.api.text.choice import CallDelta
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.engine.messages import TokenOutput

pytestmark = pytest.mark.usefixtures("generous_parse_time")

MODELS = {parser: Model(TOKENIZERS[parser]) for parser in FORMS}
# Parsers whose format can write every string, and every JSON value.
JSON_PARSERS = ["json_tools", "mistral", "kimi_k2"]
ALL_VALUES = [*JSON_PARSERS, "pythonic"]

TAGS = [form.start.strip() for form in FORMS.values()] + [
    form.end.strip() for form in FORMS.values()
]
HARD = [
    *TAGS,
    "</function>",
    "</parameter>",
    "}",
    "{",
    "[",
    ")]",
    '"',
    "'",
    "\\",
    "\n",
    "é",
    "🎿",
    ",",
]
texts = st.lists(st.sampled_from(HARD) | st.text("ab 12:", max_size=4), max_size=5).map("".join)
values = st.recursive(
    texts | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
# Calls in Python's syntax cannot have its keywords as names.
keys = st.from_regex(r"[a-z]{2,4}", fullmatch=True).filter(lambda key: not iskeyword(key))
# Words that every format can write as strings of the parameter "s", and objects of "o".
words = st.lists(
    st.sampled_from(["}", "{", '"', "'", "é", "🎿", ",", "</b>", "a b", "x\ny"]),
    min_size=1,
    max_size=4,
).map("x".join)
flat_objects = st.dictionaries(keys, words | st.integers(), max_size=2)


def deltas_of(model: Model, tokens: list[int], sizes: list[int]) -> list[list[CallDelta]]:
    """The parts of calls that each step of a reply adds, before its end."""
    choice = DialogueChoice(
        0, reading(model), vocabulary(model.tokenizer).detokenizer, StopMatcher(Stops([])), False
    )
    steps, position, turn = [], 0, 0
    while position < len(tokens):
        size = sizes[turn % len(sizes)]
        part = tokens[position : position + size]
        outputs = choice.take(TokenOutput("r", 0, part, None, None, False))
        steps.append([delta.call for delta in outputs if delta.call is not None])
        position, turn = position + size, turn + 1
    return steps


def check_calls(
    parser: str, calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> ParsedReply:
    """Checks that calls between texts arrive as they are, for chunks of several sizes."""
    model = MODELS[parser]
    after = "" if FORMS[parser].end == "" else "\nAfter"
    text = f"Before.\n{block(parser, calls)}{after}"
    one = model.read_complete(text)
    for chunks in (sizes, [1 << 20], [2, 3]):
        assert model.read_complete(text, chunks) == one
    assert [name for name, _ in one.calls] == [name for name, _ in calls], (text, one)
    decoded = [json.loads(arguments) for _, arguments in one.calls]
    assert decoded == [arguments for _, arguments in calls], (text, one)
    assert one.content == "Before." + after.strip()
    assert one.finish == "tool_calls"
    return one


@pytest.mark.slow
@pytest.mark.parametrize("parser", ALL_VALUES)
@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(keys, values, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    chunk_sizes,
)
def test_random_calls_of_formats_for_all_values(
    parser: str, calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    check_calls(parser, calls, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("parser", sorted(set(FORMS) - set(ALL_VALUES)))
@PROPERTY
@given(
    st.lists(
        st.fixed_dictionaries({"s": words}, optional={"n": st.integers(), "o": flat_objects}),
        min_size=1,
        max_size=3,
    ),
    chunk_sizes,
)
def test_random_calls_of_other_formats(
    parser: str, arguments: list[dict[str, Any]], sizes: list[int]
) -> None:
    if parser == "function_gemma":  # its values are strings and numbers
        arguments = [{key: each[key] for key in each if key != "o"} for each in arguments]
    if parser == "kimi_k3":  # the test writes only strings
        arguments = [{"s": each["s"]} for each in arguments]
    check_calls(parser, [("f", each) for each in arguments], sizes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_every_split_of_a_call_gives_the_same(family: Family) -> None:
    parser, model = family.parser, MODELS[family.parser]
    text = "So " + block(parser, [("f", {"s": "é}"}), ("g", {"t": "b"})])
    one = model.read_complete(text)
    assert [name for name, _ in one.calls] == ["f", "g"]
    for split in range(1, len(model.tokens(text))):
        assert model.read_complete(text, [split, 1 << 20]) == one


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_parts_arrive_before_the_call_is_complete(family: Family) -> None:
    parser, model = family.parser, MODELS[family.parser]
    text = block(parser, [("f", {"s": "first", "t": "second " * 20})])
    before, _, _ = text.rpartition("second")
    name, _, _ = text.partition("first")
    steps = deltas_of(model, model.tokens(before), [1])
    early = deltas_of(model, model.tokens(name), [1])
    (opening,) = [d.opening for step in early for d in step if d.opening is not None]
    assert opening.name == "f"
    written = "".join(delta.arguments for step in steps for delta in step)
    expected = '{"s": "first"'
    if parser in JSON_PARSERS:
        expected += ', "t": "' + "second " * 19
        # Every token of a value is a part of its own.
        assert sum(bool(step) for step in steps) > len("second " * 19)
    assert written == expected


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        # The model ends the call inside a value, or writes something that is no value.
        ("json_tools", '{"name": "f", "arguments": {"a": "b\n', '{"a": "b\n'),
        ("json_tools", '{"name": "f", "arguments": {\'a\': 1}}', "{'a': 1}"),
        ("qwen3_coder", "<function=f>\n<parameter=n>\nx\n</parameter>\n</function>", None),
        ("qwen3_coder", "<function=f>\n<parameter=s>\nx\n</parameter>\n", '{"s": "x"\n'),
        ("pythonic", "[f(s='a', t=...)]", None),
        ("pythonic", "[f(1)]", None),
        ("gemma4", "call:f{s:'a'}", None),
    ],
)
def test_the_arguments_of_a_malformed_call_are_as_written(
    parser: str, text: str, arguments: str | None
) -> None:
    model, form = MODELS[parser], FORMS[parser]
    start, end = form.start.strip().rstrip("["), form.end.strip().lstrip("]")
    for sizes in ([1], [5], [1 << 20]):
        reply = model.read_complete(f"So {start}{text}{end} And", sizes)
        ((name, written),) = reply.calls
        assert name == "f"
        assert arguments is None or written == arguments
        assert reply.content == "So And"
        with pytest.raises(ValueError, match=r"Expecting|Invalid|delimiter|property"):
            json.loads(written)


@pytest.mark.parametrize("parser", JSON_PARSERS)
def test_text_around_the_calls_of_a_block_is_content(parser: str) -> None:
    model, form = MODELS[parser], FORMS[parser]
    call = form.write("f", {"a": 1})
    reply = model.read_complete(f"{form.start}{call} and more{form.end}")
    assert reply.calls == [["f", '{"a": 1}']]
    assert reply.content == "and more"


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_of_an_unknown_function_is_content(parser: str) -> None:
    model, form = MODELS[parser], FORMS[parser]
    text = f"So {form.start}{form.write('unknown', {'s': 'x'})}{form.end}"
    for sizes in ([1], [7], [1 << 20]):
        reply = model.read_complete(text, sizes)
        assert (reply.content, reply.calls, reply.finish) == (text, [], "stop")


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"s": "x"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}',
        '{"id": "1", "name": "f", "arguments": {"s": "x"}}',
    ],
)
def test_an_unusual_order_is_read_when_the_call_is_complete(text: str) -> None:
    reply = MODELS["json_tools"].read_complete(f"<tool_call>{text}</tool_call>")
    assert reply.calls == [["f", '{"s": "x"}']]


def test_a_list_of_mistral_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "]"}}, {"name": "g", "arguments": {}}]'
    reply = MODELS["mistral"].read_complete(text)
    assert reply.calls == [["f", '{"s": "]"}'], ["g", "{}"]]
    assert reply.content == ""
