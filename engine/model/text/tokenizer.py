"""Loads the tokenizer of any model source, with its chat template and end-of-text ids."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config
from mlx_lm.utils import load_tokenizer as load_directory

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import check_tokenizer_files, read_object, text_config
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.tokenizer import load_gguf_tokenizer
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.detokenizer import detokenizer_of


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> TokenizerWrapper:
    """Loads a tokenizer in mlx-lm's wrapper. Each access to its ``detokenizer`` makes a new one.

    ``chat_template`` replaces the model's own.

    Raises:
        ModelError: the tokenizer is missing or damaged.
        UnsupportedModel: the kind of tokenizer is not supported.
    """
    # mlx-lm derives the format of calls from the template, so it has to load this one.
    extra = {} if chat_template is None else {"chat_template": chat_template}
    if source.kind == "gguf":
        tokenizer = load_gguf_tokenizer(GGUFFile(source.path), extra)
    else:
        tokenizer = _from_directory(source, extra)
    if chat_template is not None:
        # NOTE: mlx-lm prefers the code of its own that some models name in place of a template.
        tokenizer._chat_template = None
    # NOTE: mlx-lm's loaders have no parameter for a detokenizer. The wrapper copies this one.
    tokenizer._detokenizer = detokenizer_of(tokenizer)
    return tokenizer


def _from_directory(source: ModelSource, extra: Mapping[str, str]) -> TokenizerWrapper:
    try:
        config = load_config(source.path)
        ends = config.get("eos_token_id")
        if ends is None:
            ends = text_config(config).get("eos_token_id")
        # Only processors read this file, in which some models have their template.
        legacy = source.path / "chat_template.json"
        if not extra and legacy.exists():
            extra = {"chat_template": read_object(legacy)["chat_template"]}
        settings = {**extra, "trust_remote_code": source.trust_remote_code}
        return load_directory(source.path, settings, eos_token_ids=ends)
    except Exception as error:  # transformers raises any of its parsers' exceptions
        check_tokenizer_files(source.path)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # The line after "Validation error for field 'eos_token_id':" has the reason.
        cause = " ".join(line.strip() for line in lines[:2])[:300]
        raise ModelError(f"{source.path}: the tokenizer cannot be loaded: {cause}") from error
