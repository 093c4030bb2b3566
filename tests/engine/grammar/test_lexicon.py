"""The tokens a grammar may use: whitespace in JSON, special tokens, SentencePiece vocabularies."""

from __future__ import annotations

import pytest
from support.api.api_server import ids
from support.api.fake_engine import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from chairlift.engine.grammar.language import Lexicon, compiled, lexicon
from chairlift.engine.messages import Grammar


def test_json_allows_at_most_a_line_break_and_its_indent_between_tokens() -> None:
    tokenizer = lexicon(byte_tokenizer(), 258).load()
    matcher = compiled(Grammar("json_schema", '{"type": "array", "items": {}}'), tokenizer)
    good = ["[1,2]", "[ 1, 2 ]", '[\n  1,\n  {\n    "a": 2\n  }\n]']
    for text, fits in [(t, True) for t in good] + [(t, False) for t in ("[  1]", "[\n\n1]", " []")]:
        tokens = ids(text)
        fresh = matcher.deep_copy()
        assert (fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_stopped()) == fits, (
            text
        )


def test_special_and_unknown_tokens_never_match() -> None:
    tokenizer = byte_tokenizer()
    special = set(tokenizer.all_special_ids)
    matcher = compiled(Grammar("regex", "(?s:.)+"), lexicon(tokenizer, 300).load())
    assert all(matcher.validate_tokens([token]) == 0 for token in [*special, 280, 299])
    assert all(matcher.validate_tokens([token]) == 1 for token in ids("a<é\n")[:3])


@pytest.mark.parametrize("prefixed", [False, True])
def test_the_pieces_of_a_sentencepiece_vocabulary_match_by_their_bytes(prefixed: bool) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", '"']
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    loaded = Lexicon(tokenizer.to_str(), len(vocab), (2,)).load()
    matcher = compiled(Grammar("regex", '" a\u00e9"'), loaded)
    for text in (['"', "▁a", "<0xC3>", "<0xA9>", '"'], ['"', "▁", "a", "<0xC3>", "<0xA9>", '"']):
        fresh = matcher.deep_copy()
        assert fresh.consume_tokens([vocab[piece] for piece in text])
        assert fresh.is_stopped()
