"""Replies that complete a text which the prompt has begun."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from support.engine.bench import Bench
from support.engine.grammars import (
    ENDS,
    LEXICONS,
    TOKENIZER,
    compiler,
    default_model,
    shortest_reply,
)
from support.tiny import tiny_model

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.language import Lexicon, compiled
from chairlift.engine.grammar.trial import walk
from chairlift.engine.messages import Grammar, Resumed, SamplingParams, Submit

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["a", "<|im_end|>", "é€"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
FORM = Grammar("json_schema", json.dumps(SCHEMA))
NAMES = st.text(st.sampled_from('a é€\U0001f600"\\\n<|im_end|></s>'), max_size=8)
# The properties come in the schema's order.
VALUES = st.builds(
    lambda name, kind, sizes: {"name": name, "kind": kind, "sizes": sizes},
    NAMES,
    st.sampled_from(["a", "<|im_end|>", "é€"]),
    st.lists(st.integers(-99, 99), max_size=3),
)


def _escaped(value: Any) -> str:
    """With escapes in the free text; a grammar's own words are not escaped."""
    name, kind = json.dumps(value["name"]), json.dumps(value["kind"], ensure_ascii=False)
    return f'{{"name": {name}, "kind": {kind}, "sizes": {value["sizes"]}}}'


# How a client may have written the beginning.
WRITERS: list[Callable[[Any], str]] = [
    _escaped,
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    lambda value: "\n " + json.dumps(value, indent="\t", ensure_ascii=False),
]


def begun(grammar: Grammar, text: str) -> Grammar:
    return Grammar(grammar.kind, grammar.text, text)


@pytest.fixture(
    scope="module", params=[*LEXICONS, pytest.param(default_model, marks=pytest.mark.system)]
)
def tokenizer(request: pytest.FixtureRequest) -> LLTokenizer:
    make: Callable[[], Lexicon] = request.param
    return make().load()


@settings(max_examples=15)
@given(value=VALUES, writer=st.sampled_from(WRITERS), data=st.data())
def test_any_beginning_of_a_valid_text_is_completed(
    tokenizer: LLTokenizer, value: Any, writer: Callable[[Any], str], data: st.DataObject
) -> None:
    text = writer(value)
    cut = data.draw(st.integers(text.index("{") + 1, len(text)))
    grammar = begun(FORM, text[:cut])
    walk(tokenizer, grammar)
    reply = json.loads(text[:cut] + tokenizer.decode_str(shortest_reply(tokenizer, grammar)))
    assert set(reply) == set(SCHEMA["properties"])
    assert reply["kind"] in ("a", "<|im_end|>", "é€")
    if cut > text.index('"kind"'):
        assert reply["name"] == value["name"]


@settings(max_examples=15)
@given(value=VALUES, place=st.integers(0, 200))
def test_the_first_character_that_departs_is_named(
    tokenizer: LLTokenizer, value: Any, place: int
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    place = min(place, len(text))
    # No JSON contains a control character.
    with pytest.raises(GrammarError, match=f"departs .* at character {place + 1}$"):
        compiled(begun(FORM, f"{text[:place]}\x01{text[place:]}"), tokenizer)


@pytest.mark.parametrize(
    ("grammar", "text", "character"),
    [
        (FORM, "Sure: {", 1),
        (FORM, '{"nam": ', 6),
        (FORM, '  {"name": 5', 12),
        (Grammar("regex", "ab+é€x"), "abbé€y", 6),
        (Grammar("regex", "ab+é€x"), "abbè", 4),
        (Grammar("choice", '["yes", "no"]'), "yesn", 4),
        (Grammar("choice", '["yes", "no"]'), " yes", 1),
        (Grammar("lark", 'start: "(" start ")" | "x"'), "((x))y", 6),
    ],
    ids=str,
)
def test_a_beginning_of_no_valid_text_is_refused(
    tokenizer: LLTokenizer, grammar: Grammar, text: str, character: int
) -> None:
    with pytest.raises(GrammarError, match=f"at character {character}$"):
        compiled(begun(grammar, text), tokenizer)


def test_the_library_still_reports_grammars_that_it_cannot_compile(
    tokenizer: LLTokenizer,
) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        compiled(begun(Grammar("regex", "("), "a"), tokenizer)


def _replies(bench: Bench, name: str, n: int) -> list[str]:
    replies = [[t for t in bench.tokens(name, i) if t not in ENDS] for i in range(n)]
    return [TOKENIZER.decode(tokens) for tokens in replies]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [0, 4])
def test_an_engine_completes_the_text_of_all_choices_and_after_a_restart(draft: int) -> None:
    model, start = tiny_model("llama"), '{"na'
    bench = Bench(model, compiler=compiler(), draft=draft)
    sampled: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": ENDS, "seed": 3}
    grammar, count = begun(FORM, start), 200
    bench.submit("json", [7, 8], count, n=3, grammar=grammar, **sampled)
    bench.submit("word", [7, 8], count, grammar=begun(Grammar("regex", "[ab]{9}x"), "abab"))
    bench.drain()
    replies = _replies(bench, "json", 3)
    assert len(set(replies)) == 3
    for index, reply in enumerate(replies):
        assert bench.outputs["json", index][-1].finish == "stop"
        assert set(json.loads(start + reply)) == set(SCHEMA["properties"])
    assert re.fullmatch("[ab]{5}x", _replies(bench, "word", 1)[0])
    # The first choice in another engine, from its first, middle and last token.
    tokens = bench.tokens("json")
    params = SamplingParams(max_tokens=count, grammar=grammar, **sampled)
    other, places = Bench(model, compiler=compiler(), draft=draft), (0, 3, len(tokens) - 1)
    for place in places:
        resumed = (Resumed(0, tokens[:place], 0, 1.0, 1.0, 1.0),)
        other.core.submit(Submit(str(place), [7, 8], params, resumed=resumed))
    other.drain()
    for place in places:
        assert other.tokens(str(place)) == tokens[place:]


@pytest.mark.parametrize("draft", [0, 4])
def test_the_rest_of_a_complete_text_is_empty(draft: int) -> None:
    bench = Bench(tiny_model("llama"), compiler=compiler(), draft=draft)
    common: dict[str, Any] = {"count": 20, "n": 2, "temperature": 1.0}
    for name, grammar in {
        "word": begun(Grammar("regex", "ab"), "ab"),
        "json": begun(FORM, '{"name":"","kind":"a","sizes":[]}'),
    }.items():
        for ends in (ENDS, ()):
            bench.submit(f"{name}{len(ends)}", [7], grammar=grammar, stop_token_ids=ends, **common)
    bench.drain()
    for outputs in bench.outputs.values():
        (output,) = outputs
        assert (output.finish, output.error) == ("stop", None)
        assert set(output.token_ids) <= set(ENDS)
        assert len(output.token_ids) == 1
