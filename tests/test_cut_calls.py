"""Calls that are cut, at every place and however the text comes: what arrives is a beginning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from api_server import MESSAGES, TOKENIZER, tool
from fake_engine import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from test_tool_calls import FAMILIES, JSON, PYTHONIC, TOKENIZERS, Family

from chairlift.api.chat import calls
from chairlift.api.chat.chat_format import ThinkTags, chat_format
from chairlift.api.chat.choice import DialogueChoice, Reading
from chairlift.api.chat.prepare import reading_of
from chairlift.api.chat.tool_plan import tool_plan
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.messages import TokenLogprobs, TokenOutput
from chairlift.engine.workers.pool import Workers

FUNCTION = tool("f", {"type": "object", "properties": {"s": {"type": "string"}}})
OTHER = tool("g")
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    """A parser's time is wall time, which other processes take from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "PARSE_SECONDS", 60.0)
        yield


@dataclass
class Read:
    """What a choice tells its client."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str | None = None
    scored: int = 0


@cache
def vocabulary(tokenizer: TokenizerWrapper, tags: ThinkTags | None = None) -> Vocabulary:
    return Vocabulary(tokenizer, len(tokenizer), Workers(), chat_format(tokenizer, None, tags))


@cache
def reading(model: Model) -> Reading:
    """How a reply of a model is read."""
    known = vocabulary(model.tokenizer, model.tags)
    request = ChatRequest.model_validate(
        {"messages": MESSAGES, "tools": [FUNCTION, OTHER], **dict(model.fields)}
    )
    found = reading_of(request, known, tool_plan(request, known.format), thinks=False)
    assert found is not None
    return found


@dataclass(frozen=True)
class Model:
    """What reads the replies of a model, asked with ``fields``."""

    tokenizer: TokenizerWrapper
    fields: tuple[tuple[str, Any], ...] = ()
    tags: ThinkTags | None = None

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def read(
        self,
        tokens: Sequence[int],
        finish: str | None,
        sizes: Sequence[int] = (1,),
        ended_by: int | None = None,
        logprobs: bool = False,
    ) -> Read:
        """What comes of ``tokens``, which arrive as many at a time as ``sizes`` say in turn."""
        detokenizer = vocabulary(self.tokenizer, self.tags).detokenizer
        choice = DialogueChoice(0, reading(self), detokenizer, StopMatcher(Stops([])), logprobs)
        found = Read()
        at, turn = 0, 0
        whole = [*tokens, *([] if ended_by is None else [ended_by])]
        while found.finish is None and (at < len(whole) or (turn == 0 and finish)):
            size = sizes[turn % len(sizes)]
            turn += 1
            part = whole[at : at + size]
            at += size
            last = finish if at >= len(whole) else None
            scores = [TokenLogprobs(-1.0, [])] * len(part) if logprobs else None
            output = TokenOutput(
                "r",
                0,
                part,
                scores,
                last,  # type: ignore[arg-type]
                last is not None and ended_by is not None,
            )
            for piece in choice.take(output):
                found.scored += len(piece.scored or ())
                found.finish = piece.finish
                if piece.thought:
                    found.reasoning += piece.text
                else:
                    found.content += piece.text
                if piece.call is not None and piece.call.opening is not None:
                    assert piece.call.number == len(found.calls)
                    found.calls.append([piece.call.opening.name, ""])
                if piece.call is not None:
                    assert piece.call.number == len(found.calls) - 1
                    found.calls[-1][1] += piece.call.arguments
        return found

    def reads(self, text: str, sizes: Sequence[int] = (1,), **how: Any) -> Read:
        """What comes of a reply that the model itself ends."""
        end = self.tokenizer.eos_token_id
        return self.read(self.tokens(text), "stop", sizes, ended_by=end, **how)


def check_cuts(
    model: Model,
    text: str,
    sizes: Sequence[int],
    tags: Sequence[str],
    places: Sequence[float] | None = None,
) -> Read:
    """Cuts ``text`` by its length, by its client leaving and by a token of a client's.

    Args:
        places: where, as parts of its tokens; None: everywhere.

    Returns:
        What the whole of it says.
    """
    whole = model.reads(text, sizes)
    tokens = model.tokens(text)
    foreign = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = [1 + int(place * len(tokens)) for place in places or ()]
    for end in range(1, len(tokens) + 1) if places is None else ends:
        for finish, ended_by in (("length", None), (None, None), ("stop", foreign)):
            cut = model.read(tokens[:end], finish, sizes, ended_by)
            where = (text, end, finish, cut)
            assert len(cut.calls) <= len(whole.calls), where
            for number, (name, arguments) in enumerate(cut.calls):
                assert name == whole.calls[number][0], where
                assert whole.calls[number][1].startswith(arguments), where
                if number + 1 < len(cut.calls):
                    assert arguments == whole.calls[number][1], where
            if finish == "stop":  # what may be the beginning of a tag is text then
                assert not any(tag in cut.content for tag in tags), where
                continue
            assert whole.reasoning.startswith(cut.reasoning.rstrip()), where
            # A character of several bytes may be cut, too.
            content = cut.content.rstrip().rstrip("\ufffd")
            assert whole.content.startswith(content), where
            if finish == "length" and not (cut.finish == "tool_calls" and cut == whole):
                assert cut.finish == "length", where
    return whole


# Calls in JSON, which a grammar holds

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
places = st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=6)
chunks = st.lists(st.integers(1, 12), min_size=1, max_size=4)


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


# Calls in the models' own formats

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
    """How a family's calls are written, and what stands around several of them."""

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
# What ends calls, parameters and values in one or the other format.
ENDS = ["</function>", "</parameter>", "</invoke>", "}", ")]", '"', "'", "</tool", "\n", "é", "1"]
plain = st.lists(st.sampled_from(ENDS) | st.text("abc 12", max_size=4), max_size=4).map("".join)
flat = st.dictionaries(keys, plain | st.integers() | st.booleans(), max_size=3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from(["f", "g"]), flat), min_size=1, max_size=3), chunks, places
)
def test_a_cut_call_of_a_family_is_left_out(
    family: Family, made: list[tuple[str, dict[str, Any]]], sizes: list[int], cuts: list[float]
) -> None:
    how = FORMS[family.parser]
    written = [how.write(name, arguments) for name, arguments in made]
    if how.between is None:
        block = "".join(how.start + call + how.end for call in written)
    else:
        block = how.start + how.between.join(written) + how.end
    model = Model(TOKENIZERS[family.parser])
    text = f"Let me see.\n{block}"
    if len(model.reads(text).calls) != len(made):
        return  # the format has no way to write these values
    check_cuts(model, text, sizes, [how.start.strip()], cuts)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_every_cut_of_a_reply_in_every_family(family: Family) -> None:
    how = FORMS[family.parser]
    text = f"Let me see.\n{how.start}{how.write('f', {'s': 'é 1', 't': 12})}{how.end} And"
    model = Model(TOKENIZERS[family.parser])
    whole = check_cuts(model, text, [1], [how.start.strip()])
    assert [name for name, _ in whole.calls] == ["f"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parser)
def test_complete_calls_before_the_cut_arrive(family: Family) -> None:
    how = FORMS[family.parser]
    written = [how.write("f", {"s": "é"}), how.write("g", {"t": "b"})]
    separate = how.between is None
    text = how.start + (how.end + how.start if separate else how.between or "").join(written)
    model = Model(TOKENIZERS[family.parser])
    cut = model.read(model.tokens(text)[:-3], "length")
    if family.parser == "pythonic":  # a list that is not closed cannot be read
        assert cut.calls == []
    else:
        assert cut.calls == [["f", '{"s": "é"}']]
    assert (cut.content, cut.finish) == ("", "length")


@pytest.mark.parametrize("parser", ["json_tools", "mistral", "kimi_k2", "kimi_k3", "minimax_m2"])
def test_a_call_that_is_cut_in_what_closes_it_is_complete(parser: str) -> None:
    how, model = FORMS[parser], Model(TOKENIZERS[parser])
    text = how.start + how.write("f", {"s": "é"})
    tokens = model.tokens(text + how.end)
    for end in range(len(model.tokens(text)), len(tokens) + 1):
        cut = model.read(tokens[:end], "length")
        assert (cut.content, cut.finish) == ("", "length")
        assert cut.calls == [["f", '{"s": "é"}']]


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
