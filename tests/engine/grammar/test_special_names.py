"""Grammars whose text spells special tokens: the reply is that text, in ordinary tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from support.engine.grammars import (
    LEXICONS,
    UNMARKED,
    allowed_tokens,
    byte_level,
    default_model,
    shortest_reply,
)

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.language import Lexicon, compiled
from chairlift.engine.grammar.trial import walk
from chairlift.engine.messages import Grammar

SPELLED = ["<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<unk>", "[END]", *UNMARKED]
TEXTS = st.lists(
    st.sampled_from(SPELLED) | st.sampled_from(["a", " ", "<", ">", '"', "\\", "é", "\n", "h1>"]),
    min_size=1,
    max_size=4,
).map("".join)


@pytest.fixture(
    scope="module", params=[*LEXICONS, pytest.param(default_model, marks=pytest.mark.system)]
)
def tokenizer(request: pytest.FixtureRequest) -> LLTokenizer:
    make: Callable[[], Lexicon] = request.param
    return make().load()


def _grammars(text: str) -> Iterator[tuple[Grammar, bool]]:
    """Grammars that force a text, and whether their reply is it as JSON."""
    yield Grammar("json_schema", json.dumps({"const": text})), True
    yield Grammar("json_schema", json.dumps({"enum": [text]})), True
    yield Grammar("regex", re.escape(text)), False
    yield Grammar("choice", json.dumps([text])), False
    yield Grammar("lark", f"start: {json.dumps(text, ensure_ascii=False)}  # <s>"), False
    if "\\" not in text and '"' not in text and "\n" not in text:
        pattern = "^" + re.sub(r"([][|/])", r"\\\1", text) + "$"
        yield Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern})), True


@pytest.mark.slow
@settings(max_examples=25)
@given(text=TEXTS)
def test_a_forced_text_may_spell_special_tokens(tokenizer: LLTokenizer, text: str) -> None:
    for grammar, is_json in _grammars(text):
        walk(tokenizer, grammar)
        reply = tokenizer.decode_str(shortest_reply(tokenizer, grammar))
        assert (json.loads(reply) if is_json else reply) == text, grammar


def test_free_text_never_contains_special_tokens(tokenizer: LLTokenizer) -> None:
    special = [t for t in range(tokenizer.vocab_size) if tokenizer.is_special_token(t)]
    assert set(tokenizer.eos_tokens) <= set(special)
    for grammar in (Grammar("json_schema", '{"type": "string"}'), Grammar("regex", '"(?s:.)*"')):
        matcher = compiled(grammar, tokenizer)
        for text in ('"', "a", "<"):
            matcher.consume_tokens(tokenizer.greedy_tokenize(text))
            assert matcher.validate_tokens([*tokenizer.greedy_tokenize("a")]) == 1
            assert not any(matcher.validate_tokens([token]) for token in special)
            assert not set(special) & set(allowed_tokens(matcher.compute_bitmask(), tokenizer))


def test_lark_names_special_tokens() -> None:
    tokenizer = byte_level().load()
    (a,) = tokenizer.tokenize_str("a")
    text = r'start: "<|im_start|>" <|im_start|> /<\|im_start\|>/ <[1]> <tool_call> A // <s>'
    matcher = compiled(Grammar("lark", text + '\nA: "a" # <s>'), tokenizer)
    spelled = tokenizer.tokenize_str("<|im_start|>")
    tokens = [*spelled, 1, *spelled, 1, 259, a]
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    with pytest.raises(GrammarError, match=r'unknown special token: "<nothing>"; .*<\|im_start\|>'):
        compiled(Grammar("lark", "start: <nothing>"), tokenizer)
