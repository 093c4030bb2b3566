"""Truncated calls in the models' native formats: complete ones arrive, others are dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.tool_calls import FAMILIES, TOKENIZERS, Family
from support.api.truncated_replies import (
    PROPERTY,
    Model,
    check_truncations,
    chunk_sizes,
    cut_positions,
)

pytestmark = pytest.mark.usefixtures("generous_parse_time")

Write = Callable[[str, dict[str, Any]], str]


def _xml(start: str, item: str, end: str) -> Write:
    def write(name: str, arguments: dict[str, Any]) -> str:
        items = "".join(item.format(key=key, value=arguments[key]) for key in arguments)
        return start.format(name=name) + items + end

    return write


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"call:{name}{{{','.join(_gemma_item(*item) for item in arguments.items())}}}"


def _gemma_item(key: str, value: Any) -> str:
    return f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{json.dumps(value)}"


def _mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def _kimi(name: str, arguments: dict[str, Any]) -> str:
    encoded = json.dumps(arguments, ensure_ascii=False)
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{encoded}"
        "<|tool_call_end|>"
    )


@dataclass(frozen=True)
class Form:
    """The native format of a family's calls.

    Attributes:
        write: gives a call's text, from its name and arguments.
        start, end: the text around all calls of a block.
        between: the text between calls of a block; None if a block has one call.
    """

    write: Write
    start: str
    between: str | None
    end: str


FORMS = {
    "json_tools": Form(
        lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
        "<tool_call>\n",
        None,
        "\n</tool_call>",
    ),
    "qwen3_coder": Form(
        _xml("<function={name}>\n", "<parameter={key}>\n{value}\n</parameter>\n", "</function>"),
        "<tool_call>\n",
        None,
        "\n</tool_call>",
    ),
    "pythonic": Form(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "mistral": Form(_mistral, "[TOOL_CALLS]", "", ""),
    "glm47": Form(
        _xml("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", ""),
        "<tool_call>",
        None,
        "</tool_call>",
    ),
    "minimax_m2": Form(
        _xml(
            '<invoke name="{name}">\n', '<parameter name="{key}">{value}</parameter>\n', "</invoke>"
        ),
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "gemma4": Form(_gemma, "<|tool_call>", None, "<tool_call|>"),
    "function_gemma": Form(
        lambda name, arguments: _gemma(name, arguments).replace('<|"|>', "<escape>"),
        "<start_function_call>",
        None,
        "<end_function_call>",
    ),
    "kimi_k2": Form(_kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "longcat": Form(
        _xml(
            "{name}\n",
            "<longcat_arg_key>{key}</longcat_arg_key>\n"
            "<longcat_arg_value>{value}</longcat_arg_value>\n",
            "",
        ),
        "<longcat_tool_call>",
        None,
        "</longcat_tool_call>",
    ),
    "minicpm5": Form(
        _xml('{name}">', '<param name="{key}">{value}</param>', ""),
        '<function name="',
        None,
        "</function>",
    ),
    "kimi_k3": Form(
        _xml(
            '<|open|>call tool="{name}" index="1"<|sep|>',
            '<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>',
            "<|close|>call<|sep|>",
        ),
        "<|open|>tools<|sep|>\n",
        "\n",
        "\n<|close|>tools<|sep|>",
    ),
}
names = st.sampled_from(["f", "g"])
keys = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
# Texts that end a call, a parameter or a value in some format.
ENDS = ["</function>", "</parameter>", "</invoke>", "}", ")]", '"', "'", "</tool", "\n", "é", "1"]
plain = st.lists(st.sampled_from(ENDS) | st.text("abc 12", max_size=4), max_size=4).map("".join)
flat = st.dictionaries(keys, plain | st.integers() | st.booleans(), max_size=3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from(["f", "g"]), flat), min_size=1, max_size=3),
    chunk_sizes,
    cut_positions,
)
def test_a_truncated_native_call_is_left_out(
    family: Family, made: list[tuple[str, dict[str, Any]]], sizes: list[int], cuts: list[float]
) -> None:
    form = FORMS[family.parser]
    written = [form.write(name, arguments) for name, arguments in made]
    if form.between is None:
        block = "".join(form.start + call + form.end for call in written)
    else:
        block = form.start + form.between.join(written) + form.end
    model = Model(TOKENIZERS[family.parser])
    text = f"Let me see.\n{block}"
    if len(model.read_complete(text).calls) != len(made):
        return  # the format cannot express these values
    check_truncations(model, text, sizes, [form.start.strip()], cuts)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_every_truncation_of_a_reply_in_every_family(family: Family) -> None:
    form = FORMS[family.parser]
    text = f"Let me see.\n{form.start}{form.write('f', {'s': 'é 1', 't': 12})}{form.end} And"
    model = Model(TOKENIZERS[family.parser])
    complete = check_truncations(model, text, [1], [form.start.strip()])
    assert [name for name, _ in complete.calls] == ["f"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_complete_calls_before_the_truncation_arrive(family: Family) -> None:
    form = FORMS[family.parser]
    written = [form.write("f", {"s": "é"}), form.write("g", {"t": "b"})]
    separate = form.between is None
    text = form.start + (form.end + form.start if separate else form.between or "").join(written)
    model = Model(TOKENIZERS[family.parser])
    cut = model.read(model.tokens(text)[:-3], "length")
    if family.parser == "pythonic":  # a list that is not closed cannot be read
        assert cut.calls == []
    else:
        assert cut.calls == [["f", '{"s": "é"}']]
    assert (cut.content, cut.finish) == ("", "length")


@pytest.mark.parametrize("parser", ["json_tools", "mistral", "kimi_k2", "kimi_k3", "minimax_m2"])
def test_a_call_truncated_in_its_closing_tag_is_complete(parser: str) -> None:
    form, model = FORMS[parser], Model(TOKENIZERS[parser])
    text = form.start + form.write("f", {"s": "é"})
    tokens = model.tokens(text + form.end)
    for end in range(len(model.tokens(text)), len(tokens) + 1):
        cut = model.read(tokens[:end], "length")
        assert (cut.content, cut.finish) == ("", "length")
        assert cut.calls == [["f", '{"s": "é"}']]
