"""Grammars in tests: a compiler, vocabularies of every kind, and replies without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from support.api.api_server import TOKENIZER as BYTE_TOKENIZER
from support.api.api_server import ids
from support.models import default_model_path
from support.tiny import EOS_ID, IM_END_ID, VOCAB_SIZE, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.language import Lexicon, check, compiled, lexicon
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import Grammar
from chairlift.engine.model.text.tokenizer import load_tokenizer

TOKENIZER = tiny_tokenizer()
ENDS = (EOS_ID, IM_END_ID)
MAX_TOKENS = 2000
# Its tokens are single bytes.
BYTES = lexicon(BYTE_TOKENIZER, 258).load()
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


@cache
def compiler() -> Compiler:
    """Compiles for the tiny model's vocabulary."""
    return Compiler(lambda: Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS))


def allowed_tokens(mask: bytes, tokenizer: LLTokenizer) -> list[int]:
    """The tokens of a mask, without those that end a text."""
    ends = set(tokenizer.eos_tokens)
    bits = enumerate(mask)
    tokens = [8 * word + bit for word, byte in bits if byte for bit in range(8) if byte >> bit & 1]
    return [token for token in tokens if token not in ends]


def shortest_reply(tokenizer: LLTokenizer, grammar: Grammar) -> list[int]:
    """The tokens of a model that ends its reply as soon as it may.

    It writes quotes and brackets rather than other characters, so that texts and lists end.
    """
    matcher = compiled(grammar, tokenizer)
    closing = [*tokenizer.greedy_tokenize('"]}'), *tokenizer.greedy_tokenize("0a")]
    tokens: list[int] = []
    while not matcher.is_accepting():
        assert len(tokens) < MAX_TOKENS
        forced = matcher.deep_copy().compute_ff_tokens()
        allowed = allowed_tokens(matcher.compute_bitmask(), tokenizer)
        assert not any(map(tokenizer.is_special_token, [*forced, *allowed]))
        tokens.append(next((token for token in closing if token in allowed), allowed[0]))
        matcher.consume_token(tokens[-1])
        check(matcher)
    return tokens


def matcher(schema: Any) -> LLMatcher:
    return compiled(Grammar("json_schema", json.dumps(schema)), BYTES)


def accepted_of(texts: Iterable[str], schema: Any) -> list[str]:
    """Those of the texts that the schema's grammar accepts."""
    grammar = matcher(schema)
    found = []
    for text in texts:
        fresh, tokens = grammar.deep_copy(), ids(text)
        if fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting():
            found.append(text)
    return found
