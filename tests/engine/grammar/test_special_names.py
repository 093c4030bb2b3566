"""Grammars whose text spells special tokens: the reply is that text, in ordinary tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from support.models import default_model_path
from support.tiny import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.language import Lexicon, check, compiled, lexicon
from chairlift.engine.grammar.trial import walk
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Grammar
from chairlift.engine.model.text.tokenizer import load_tokenizer

UNMARKED = ["<tool_call>", "<h1>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Lexicon:
    """GPT-2's kind. Some tokens are not marked as special; an end of texts is not in brackets."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([*UNMARKED, "[END]"])
    return Lexicon(tokenizer.to_str(), 280, (2, tokenizer.token_to_id("[END]")))


def sentencepiece() -> Lexicon:
    """Llama 2's kind: merges make special tokens, one of which is not an added token."""
    pieces = ["<unk>", "<s>", "</s>", "<h1>", *BYTE_PIECES, *'▁<>/shau1[]END"{}:', "<h", "1>", "</"]
    pieces += ["s>", "<s", "▁a"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("<", "h"), ("1", ">"), ("<", "/"), ("s", ">"), ("<", "s"), ("▁", "a")]
    merges += [("<h", "1>"), ("</", "s>"), ("<s", ">")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    _decode_pieces(tokenizer)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens([AddedToken("<h1>", normalized=True)])
    return Lexicon(tokenizer.to_str(), len(pieces) + 3, (2,))


def unigram() -> Lexicon:
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *'▁<>/shau1[]END"{}:', "</s", "▁a"]
    scored = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    _decode_pieces(tokenizer)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Lexicon(tokenizer.to_str(), len(pieces), (2,))


def default_model() -> Lexicon:
    source = ModelSource("smollm", "gguf", default_model_path())
    return lexicon(load_tokenizer(source), 49152)


def _decode_pieces(tokenizer: Tokenizer) -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)


LEXICONS: list[Callable[[], Lexicon]] = [byte_level, sentencepiece, unigram]
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


def _allowed(mask: bytes, tokenizer: LLTokenizer) -> list[int]:
    ends = set(tokenizer.eos_tokens)
    bits = enumerate(mask)
    tokens = [8 * word + bit for word, byte in bits if byte for bit in range(8) if byte >> bit & 1]
    return [token for token in tokens if token not in ends]


def _reply(tokenizer: LLTokenizer, grammar: Grammar) -> str:
    """The reply of a model that always chooses the first of the allowed tokens."""
    matcher = compiled(grammar, tokenizer)
    tokens: list[int] = []
    while not matcher.is_stopped():
        forced = matcher.deep_copy().compute_ff_tokens()
        assert not any(map(tokenizer.is_special_token, forced))
        allowed = _allowed(matcher.compute_bitmask(), tokenizer)
        check(matcher)
        if not allowed:
            break
        assert not any(map(tokenizer.is_special_token, allowed))
        tokens.append(allowed[0])
        matcher.consume_token(allowed[0])
        check(matcher)
    assert matcher.is_accepting()
    return str(tokenizer.decode_str(tokens))


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


@settings(max_examples=25)
@given(text=TEXTS)
def test_a_forced_text_may_spell_special_tokens(tokenizer: LLTokenizer, text: str) -> None:
    for grammar, is_json in _grammars(text):
        walk(tokenizer, grammar)
        reply = _reply(tokenizer, grammar)
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
            assert not set(special) & set(_allowed(matcher.compute_bitmask(), tokenizer))


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
