"""Converts a GGUF file's tokenizer to Hugging Face's tokenizer files, in the cache folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_directory
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from chairlift.engine.config import cache_dir
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.gguf.file import GGUFFile

# Part of the cache key. Increase it when this module's output changes.
_FORMAT = 1

# llama.cpp's token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Tokens with these names end a turn or a text, even if the metadata does not say so.
_END_NAMES = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2_SPLIT = _WORDS + r"\p{N}" + _REST
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def load_gguf_tokenizer(file: GGUFFile, extra: Mapping[str, str] | None = None) -> TokenizerWrapper:
    """The file's tokenizer, with its chat template, special tokens and all ids that end a text.

    It is built once per file content, and cached in the cache folder. ``extra`` overrides values of
    its tokenizer_config.json.

    Raises:
        ModelError: the metadata is incomplete or damaged, or the cache folder cannot be written.
        UnsupportedModel: the tokenizer's model or pre-tokenizer is not supported.
    """
    key = f"{_FORMAT}-{tokenizers.__version__}-{file.header_sha256[:24]}"
    folder = cache_dir() / "tokenizers" / key
    if not folder.is_dir():
        _build(file, folder)
    ends = end_token_ids(file)
    try:
        return load_directory(folder, extra, eos_token_ids=ends)
    except Exception:
        # The folder was complete when it was renamed, so it has been damaged since.
        shutil.rmtree(folder, ignore_errors=True)
        _build(file, folder)
        return load_directory(folder, extra, eos_token_ids=ends)


def end_token_ids(file: GGUFFile) -> list[int]:
    """The ids that end a text: those in the metadata, and control tokens with a known name."""
    tokens, types = _tokens(file), _types(file)
    ids = {file.get(f"tokenizer.ggml.{key}", int, -1) for key in _END_KEYS}
    ids |= {
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token in _END_NAMES
    }
    return sorted(i for i in ids if 0 <= i < len(tokens))


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises:
        ModelError, UnsupportedModel: as ``load_gguf_tokenizer``.
    """
    model = file.require("tokenizer.ggml.model", str)
    try:
        if model == "gpt2":
            tokenizer = _byte_level(file)
        elif model == "llama":
            tokenizer = _sentencepiece(file)
        else:
            raise UnsupportedModel(f"{file.path}: tokenizer model {model!r} is not supported")
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"{file.path}: damaged tokenizer: {error}") from error
    typed = list(zip(_tokens(file), _types(file), strict=True))
    # Only two calls, because each call rebuilds the matcher of all added tokens.
    special = [t for t, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = [t for t, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.post_processor = _post_processor(file, model)
    return tokenizer


def _build(file: GGUFFile, folder: Path) -> None:
    tokenizer = build_tokenizer(file)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    tokens = _tokens(file)
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= number < len(tokens):
            settings[f"{role}_token"] = tokens[number]
    if template := file.get("tokenizer.chat_template", str, ""):
        settings["chat_template"] = template
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix="build-"))
        try:
            tokenizer.save(str(work / "tokenizer.json"))
            (work / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            os.rename(work, folder)
        except OSError:
            shutil.rmtree(work, ignore_errors=True)
            if not folder.is_dir():  # otherwise, another process has just built it
                raise
    except OSError as error:
        raise ModelError(f"cannot write the tokenizer to the cache {folder}: {error}") from error


def _tokens(file: GGUFFile) -> list[str]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    return tokens


def _types(file: GGUFFile) -> list[int]:
    count = len(_tokens(file))
    types: list[int] = file.get("tokenizer.ggml.token_type", list, [_NORMAL] * count)
    if len(types) != count:
        raise ModelError(f"{file.path}: {count} tokens but {len(types)} token types")
    return types


def _byte_level(file: GGUFFile) -> Tokenizer:
    # NOTE: files without this key were made before 2024, with GPT-2's rule or a wrong one.
    pre = file.get("tokenizer.ggml.pre", str, "default")
    merges = [tuple(m.split(" ", 1)) for m in file.require("tokenizer.ggml.merges", list)]
    vocab = {token: i for i, token in enumerate(_tokens(file))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES))
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(file: GGUFFile, pre: str) -> PreTokenizer:
    if pre in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "starcoder", "refact"):
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre in _LLAMA3_NAMES:
        split = _LLAMA3_SPLIT
    elif pre in ("qwen2", "deepseek-r1-qwen"):
        split = _QWEN2_SPLIT
    else:
        raise UnsupportedModel(f"{file.path}: pre-tokenizer {pre!r} is not supported")
    return Sequence(
        [
            Split(Regex(split), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    tokens = _tokens(file)
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_by_score(file, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges, best first. SentencePiece merges the neighbours whose union scores highest."""
    scores: list[float] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(_tokens(file)):
        raise ModelError(f"{file.path}: {len(vocab)} tokens but {len(scores)} scores")
    pieces = {t for t, kind in zip(_tokens(file), _types(file), strict=True) if kind == _NORMAL}
    ranked = sorted(pieces, key=lambda piece: (-scores[vocab[piece]], vocab[piece]))
    return list(
        itertools.chain.from_iterable(
            [
                (piece[:cut], piece[cut:])
                for cut in range(1, len(piece))
                if piece[:cut] in pieces and piece[cut:] in pieces
            ]
            for piece in ranked
        )
    )


def _post_processor(file: GGUFFile, model: str) -> processors.PostProcessor:
    """A post-processor that adds the tokens that begin and end every text, if the model has any."""
    # llama.cpp's rule for files without the key.
    pre = file.get("tokenizer.ggml.pre", str, "default")
    adds_bos = model == "llama" or pre in _LLAMA3_NAMES
    template, special = ["$A"], []
    for role, default in (("bos", adds_bos), ("eos", False)):
        if not file.get(f"tokenizer.ggml.add_{role}_token", bool, default):
            continue
        number = file.require(f"tokenizer.ggml.{role}_token_id", int)
        tokens = _tokens(file)
        if not 0 <= number < len(tokens):
            raise ModelError(f"{file.path}: {role}_token_id {number} is outside the vocabulary")
        token = tokens[number]
        special.append((token, number))
        template = [token, *template] if role == "bos" else [*template, token]
    if not special:
        # As in Hugging Face's files; this only changes offsets.
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(single=template, special_tokens=special)
