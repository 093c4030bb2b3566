"""Detokenizers join characters that are split, and stream the text of ``decode``."""

from __future__ import annotations

import random
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from support.engine.detokenizing import streamed_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.detokenizer import ByteDetokenizer, detokenizer_of
from chairlift.engine.model.text.tokenizer import load_tokenizer

# The bytes of the euro sign are E2 82 AC.
TOKENS = [b" a", b"\xe2", b"\x82\xac", b"\xe2\x82\xac", b"\xac", b""]


def text(detokenizer: Any, tokens: list[int]) -> str:
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def test_tokens_have_the_same_text_when_they_come_again() -> None:
    detokenizer = ByteDetokenizer(TOKENS, strip=True)
    every = [0, 1, 2, 3, 4, 1, 0, 5, 2, 9, 3, 1]
    for tokens in (every, every[::-1], [0, 1, 0, 4, 1, 2], [1, 5, 2], [4, 4, 1, 4]):
        expected = b"".join(TOKENS[t] for t in tokens if t < len(TOKENS)).decode(errors="replace")
        assert text(copy(detokenizer), tokens) == expected.removeprefix(" ")
        assert text(detokenizer, tokens) == expected.removeprefix(" ")


# A vocabulary of SentencePiece, whose spaces begin words; decoders drop that of a text's first one.
PIECES = ["<unk>", "▁", "▁a", "▁the", "b", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
LINES = ["a\n a  the\n\n  the b", "日本\n é🎿b the", " b\n日 b", "\n", " ", ""]


def loaded(folder: Path, decoder: Any) -> Any:
    scored = [(piece, -float(number)) for number, piece in enumerate(PIECES)]
    backend = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    return load_tokenizer(ModelSource("m", "directory", folder))


@pytest.mark.parametrize("fuses", [True, False])
def test_lines_of_any_decoder_keep_their_spaces_and_repeat_nothing(
    tmp_path: Path, fuses: bool
) -> None:
    last = [decoders.Fuse()] if fuses else []
    steps = [decoders.ByteFallback(), decoders.Metaspace(), *last]
    tokenizer = loaded(tmp_path, decoders.Sequence(steps))
    for line in LINES:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert streamed_text(tokenizer, ids) == tokenizer.decode(ids)
    drawn = random.Random(3)
    for _ in range(200):
        ids = [drawn.randrange(1, PIECES.index("<0x80>")) for _ in range(12)]
        assert streamed_text(tokenizer, [*ids, 9999]) == tokenizer.decode(ids)


def test_bytes_of_no_character_do_not_delay_the_text_behind_them(tmp_path: Path) -> None:
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    detokenizer = loaded(tmp_path, decoders.Sequence(steps)).detokenizer
    for _ in range(20):
        detokenizer.add_token(PIECES.index("<0xFF>"))
    assert detokenizer.last_segment == "\ufffd" * 16
    detokenizer.add_token(PIECES.index("▁a"))
    assert detokenizer.last_segment == "\ufffd" * 4 + " a"


def test_ids_without_a_token_hide_none_behind_them() -> None:
    vocabulary = {character: number for number, character in enumerate(bytes_to_unicode().values())}
    vocabulary |= {"Ġthe": 300}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert text(detokenizer_of(tokenizer), [vocabulary["b"], 299, 300]) == "b the"
