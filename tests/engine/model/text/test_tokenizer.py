"""Tokenizers rebuilt from GGUF metadata, and streamed text that equals ``decode``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.engine.detokenizing import TEXTS, streamed_text
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import BYTES, EOS_ID, IM_END_ID, SPECIALS, tiny_model, tiny_model_dir

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.tokenizer import build_tokenizer
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.tokenizer import load_tokenizer

# Pieces of a SentencePiece vocabulary, best score first; then bytes.
PIECES = ["▁the", "▁th", "he", "▁t", "at", "▁", "t", "h", "e", "a", "c", "s", "\n", "é", "ca"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<end_of_turn>", "  ", *BYTE_TOKENS, *PIECES],
    "tokenizer.ggml.token_type": [2, 3, 3, 3, 4] + [6] * 256 + [1] * len(PIECES),
    "tokenizer.ggml.scores": [-1000.0] * 5 + [0.0] * 256 + [-float(i) for i in range(len(PIECES))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _source(tmp_path: Path, metadata: dict[str, Any]) -> ModelSource:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), metadata=metadata)
    return ModelSource("m", "gguf", path)


def test_a_built_tokenizer_is_cached_and_rebuilt_if_damaged(tmp_path: Path, cache: Path) -> None:
    source = _source(tmp_path, {})
    first = load_tokenizer(source)
    (folder,) = (cache / "tokenizers").iterdir()
    built = (folder / "tokenizer.json").stat()
    assert load_tokenizer(source).encode("hé") == first.encode("hé")
    assert (folder / "tokenizer.json").stat().st_ino == built.st_ino
    (folder / "tokenizer.json").write_text('{"version": ')
    assert load_tokenizer(source).encode("hé") == first.encode("hé")
    assert [path.name for path in (cache / "tokenizers").iterdir()] == [folder.name]


def test_another_chat_template_replaces_the_models_own(tmp_path: Path, cache: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<tool_call>"
    template += "{# tool_call.name #}"
    chat = [{"role": "user", "content": "hi"}]
    folder = tiny_model_dir(tmp_path / "tiny", "llama")
    for source in (_source(tmp_path, {}), ModelSource("m", "directory", folder)):
        tokenizer = load_tokenizer(source, template)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert text == "<user>hi<tool_call>"
        # The format of calls follows from it, too.
        assert tokenizer.has_tool_calling
        assert load_tokenizer(source).chat_template != template


def test_byte_level_from_a_tiny_file(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_tokenizer(_source(tmp_path, {}))
    text = " xth<|im_end|>é🎿"
    ids = tokenizer.encode(text)
    assert len(ids) == 2 + 1 + 1 + 2 + 4
    assert ids[2:4] == [GGUF_VOCAB_SIZE - 1, IM_END_ID]
    assert streamed_text(tokenizer, ids) == tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {EOS_ID, IM_END_ID}
    rng = random.Random(1)
    for _ in range(100):
        noise = [rng.randrange(len(tokenizer)) for _ in range(30)]
        assert streamed_text(tokenizer, noise) == tokenizer.decode(noise)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab  12345 it's", ["ab", " ", " 12345", " it", "'s"]),
        ("smollm", "ab 123's", ["ab", " ", "1", "2", "3", "'s"]),
        ("llama-bpe", "ab 12345 IT'S\n\nx", ["ab", " ", "123", "45", " IT", "'S", "\n\n", "x"]),
        ("qwen2", "ab 123 (x)", ["ab", " ", "1", "2", "3", " (", "x", ")"]),
    ],
)
def test_pre_tokenizers_split_text_into_words(
    tmp_path: Path, pre: str, text: str, words: list[str]
) -> None:
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0}
    source = _source(tmp_path, metadata)
    parts = build_tokenizer(GGUFFile(source.path)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in parts] == words


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0]),
        ({"tokenizer.ggml.add_bos_token": True}, [0]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, []),
    ],
)
def test_the_begin_token_is_added_as_the_file_says(
    tmp_path: Path, cache: Path, metadata: dict[str, Any], expected: list[int]
) -> None:
    source = _source(tmp_path, {"tokenizer.ggml.bos_token_id": 0} | metadata)
    tokenizer = load_tokenizer(source)
    body = len(SPECIALS) + BYTES.index("x")
    assert tokenizer.encode("x") == [*expected, body]
    assert tokenizer.encode("x", add_special_tokens=False) == [body]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_tokenizer(_source(tmp_path, SPM | {"tokenizer.ggml.add_eos_token": True}))
    names = tokenizer.convert_ids_to_tokens(tokenizer.encode("the cat  é ñ<end_of_turn>"))
    # fmt: off
    assert names == [
        "<s>", "▁the", "▁", "c", "at", "  ", "▁", "é", "▁", "<0xC3>", "<0xB1>", "<end_of_turn>",
        "</s>",
    ]
    # fmt: on
    assert tokenizer.eos_token_ids == {2, 3}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_is_streamed_as_decoded(
    tmp_path: Path, cache: Path, prefix: bool
) -> None:
    tokenizer = load_tokenizer(_source(tmp_path, SPM | {"tokenizer.ggml.add_space_prefix": prefix}))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert streamed_text(tokenizer, ids) == tokenizer.decode(ids)
        if not prefix:
            assert tokenizer.decode(ids) == text
    rng = random.Random(2)
    first_piece = 5 + 256
    for _ in range(200):
        # NOTE: Without bytes: for invalid UTF-8, decode() gives more U+FFFD than streaming.
        ids = [rng.choice([4, *range(first_piece, len(tokenizer))]) for _ in range(20)]
        assert streamed_text(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("metadata", "error", "line"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedModel, "pre-tokenizer 'klingon'"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.model": None}, ModelError, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.merges": ["no where"]}, ModelError, "damaged tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 1]}, ModelError, "260 tokens but 2 token types"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 999},
            ModelError,
            "bos_token_id 999 is outside",
        ),
    ],
)
def test_bad_tokenizers_are_one_line_errors(
    tmp_path: Path, cache: Path, metadata: dict[str, Any], error: type[ModelError], line: str
) -> None:
    source = _source(tmp_path, metadata)
    with pytest.raises(error, match=line) as caught:
        load_tokenizer(source)
    assert str(source.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directorys_tokenizer_streams_leading_spaces_and_has_all_end_tokens(
    tmp_path: Path,
) -> None:
    path = tiny_model_dir(tmp_path, "qwen3")
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = load_tokenizer(ModelSource("tiny", "directory", path))
    assert tokenizer.eos_token_ids == {EOS_ID, IM_END_ID}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert streamed_text(tokenizer, ids) == tokenizer.decode(ids) == text


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: damaged, this is not JSON") as caught:
        load_tokenizer(ModelSource("tiny", "directory", path))
    assert "\n" not in str(caught.value)
