"""Tokenizers rebuilt from GGUF metadata, and streaming text that equals ``decode``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.models import GGUF_VOCAB_SIZE, default_model_path, write_tiny_gguf
from support.tiny import BYTES, EOS_ID, IM_END_ID, SPECIALS, tiny_model, tiny_model_dir

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.gguf.file import GGUFFile
from chairlift.engine.gguf.tokenizer import build_tokenizer
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.tokenizer import load_tokenizer

TEXTS = [
    "Hello, world!",
    " a leading space",
    "two  spaces   and more    ",
    "line\n\n  indented\r\n\ttab",
    "naïve café — “quoted” €99",
    "👩‍👩‍👧‍👦 and 🎿🚠, 日本語 and العربية",
    "in 2024, 12345 + 67",
    "\n",
    " ",
    "",
]
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


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_tokenizer(ModelSource("smollm", "gguf", default_model_path()))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _source(tmp_path: Path, metadata: dict[str, Any]) -> ModelSource:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), metadata=metadata)
    return ModelSource("m", "gguf", path)


def _streamed(tokenizer: Any, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == detokenizer.text
    assert detokenizer.tokens == ids
    # What was sent is never half a character, but where the text truly ends so.
    assert not any("\ufffd" in segment for segment in segments) or "\ufffd" in detokenizer.text
    return detokenizer.text


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_gives_texts_back_and_streams_them(smollm: Any, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert _streamed(smollm, ids) == text


def test_smollm_streams_any_tokens_as_it_decodes_them(smollm: Any) -> None:
    rng = random.Random(0)
    for length in [1, 2, 3, 5, 8, 40, 200] * 5:
        ids = [rng.randrange(len(smollm)) for _ in range(length)]
        assert _streamed(smollm, ids) == smollm.decode(ids)


def test_smollm_tokenizes_as_llama_cpp(smollm: Any) -> None:
    # From llama-tokenize of llama.cpp b11434; digits stand alone, spaces join the next word.
    text = "Hello  world,   this\n\n is 12345 ünïcode 😀 <html> the end   "
    # fmt: off
    expected = [
        19556, 216, 905, 28, 256, 451, 1116, 314, 216, 33, 34, 35, 36, 37, 5549, 137, 94, 25972,
        4635, 40303, 218, 2067, 5699, 46, 260, 1112, 333,
    ]
    # fmt: on
    assert smollm.encode(text) == expected


def test_smollm_chat_template_and_special_tokens(smollm: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = smollm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.apply_chat_template(messages, add_generation_prompt=True)
    assert ids.count(1) == 3  # <|im_start|> of system, user, assistant
    assert smollm.decode(ids) == text
    # The base model's end and the chat's; the metadata names only the latter.
    assert smollm.eos_token_ids == {0, 2}


def test_detokenizers_are_independent(smollm: Any) -> None:
    one, other = smollm.detokenizer, smollm.detokenizer
    ids = smollm.encode("🎿")
    one.add_token(ids[0])
    other.add_token(smollm.encode("x")[0])
    assert other.text == "x"
    assert one.text == ""


def test_the_built_tokenizer_is_kept_and_mended(tmp_path: Path, cache: Path) -> None:
    source = _source(tmp_path, {})
    first = load_tokenizer(source)
    (folder,) = (cache / "tokenizers").iterdir()
    built = (folder / "tokenizer.json").stat()
    assert load_tokenizer(source).encode("hé") == first.encode("hé")
    assert (folder / "tokenizer.json").stat().st_ino == built.st_ino
    (folder / "tokenizer.json").write_text('{"version": ')
    assert load_tokenizer(source).encode("hé") == first.encode("hé")
    assert [path.name for path in (cache / "tokenizers").iterdir()] == [folder.name]


def test_byte_level_from_a_tiny_file(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_tokenizer(_source(tmp_path, {}))
    text = " xth<|im_end|>é🎿"
    ids = tokenizer.encode(text)
    assert len(ids) == 2 + 1 + 1 + 2 + 4
    assert ids[2:4] == [GGUF_VOCAB_SIZE - 1, IM_END_ID]
    assert _streamed(tokenizer, ids) == tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {EOS_ID, IM_END_ID}
    rng = random.Random(1)
    for _ in range(100):
        noise = [rng.randrange(len(tokenizer)) for _ in range(30)]
        assert _streamed(tokenizer, noise) == tokenizer.decode(noise)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab  12345 it's", ["ab", " ", " 12345", " it", "'s"]),
        ("smollm", "ab 123's", ["ab", " ", "1", "2", "3", "'s"]),
        ("llama-bpe", "ab 12345 IT'S\n\nx", ["ab", " ", "123", "45", " IT", "'S", "\n\n", "x"]),
        ("qwen2", "ab 123 (x)", ["ab", " ", "1", "2", "3", " (", "x", ")"]),
    ],
)
def test_pre_tokenizers_cut_text_into_words(
    tmp_path: Path, pre: str, text: str, words: list[str]
) -> None:
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0}
    source = _source(tmp_path, metadata)
    cut = build_tokenizer(GGUFFile(source.path)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0]),
        ({"tokenizer.ggml.add_bos_token": True}, [0]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, []),
    ],
)
def test_the_beginning_token_is_added_where_the_file_wants_it(
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
def test_sentencepiece_streams_what_it_decodes(tmp_path: Path, cache: Path, prefix: bool) -> None:
    tokenizer = load_tokenizer(_source(tmp_path, SPM | {"tokenizer.ggml.add_space_prefix": prefix}))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert _streamed(tokenizer, ids) == tokenizer.decode(ids)
        if not prefix:
            assert tokenizer.decode(ids) == text
    rng = random.Random(2)
    first_piece = 5 + 256
    for _ in range(200):
        # No bytes: where they are not UTF-8, decode() shows one U+FFFD a byte, streaming fewer.
        ids = [rng.choice([4, *range(first_piece, len(tokenizer))]) for _ in range(20)]
        assert _streamed(tokenizer, ids) == tokenizer.decode(ids)


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
def test_tokenizers_that_cannot_be_built(
    tmp_path: Path, cache: Path, metadata: dict[str, Any], error: type[ModelError], line: str
) -> None:
    source = _source(tmp_path, metadata)
    with pytest.raises(error, match=line) as caught:
        load_tokenizer(source)
    assert str(source.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_streams_leading_spaces_and_has_all_its_ends(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "qwen3")
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = load_tokenizer(ModelSource("tiny", "directory", path))
    assert tokenizer.eos_token_ids == {EOS_ID, IM_END_ID}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert _streamed(tokenizer, ids) == tokenizer.decode(ids) == text


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(ModelSource("tiny", "directory", path))
    assert "\n" not in str(caught.value)
