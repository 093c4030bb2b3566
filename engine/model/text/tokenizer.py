"""Loads the tokenizer of any model source, with its chat template and end-of-text ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config
from mlx_lm.utils import load_tokenizer as load_directory

from chairlift.engine.errors import ModelError
from chairlift.engine.hub.folder_check import check_tokenizer_files, read_object, text_config
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.tokenizer import load_gguf_tokenizer
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.detokenizer import detokenizer_of

# The variable for the folder of tiktoken's cache; if it is empty, there is none.
_TIKTOKEN_CACHE = "TIKTOKEN_CACHE_DIR"


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


def _from_directory(source: ModelSource, extra: Mapping[str, Any]) -> TokenizerWrapper:
    try:
        config = load_config(source.path)
        ends = config.get("eos_token_id")
        if ends is None:
            ends = text_config(config).get("eos_token_id")
        if not extra and (template := _legacy_template(source.path)) is not None:
            extra = {"chat_template": template}
        settings = {**extra, "trust_remote_code": source.trust_remote_code}
        with _tiktoken_without_cache(source):
            return load_directory(source.path, settings, eos_token_ids=ends)
    except ModelError:
        raise
    except Exception as error:  # transformers raises any of its parsers' exceptions
        check_tokenizer_files(source.path)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # The line after "Validation error for field 'eos_token_id':" has the reason.
        cause = " ".join(line.strip() for line in lines[:2])[:300]
        own = next(source.path.glob("*.tiktoken"), None)
        if own is not None and not source.trust_remote_code:
            cause = f"only the model's own code reads {own.name}; --trust-remote-code allows it"
        raise ModelError(f"{source.path}: the tokenizer cannot be loaded: {cause}") from error


def _legacy_template(path: Path) -> str | list[Any] | None:
    """The template in chat_template.json, which only processors read; None if there is none.

    As in transformers, chat_template.jinja goes before it.

    Raises:
        ModelError: the file is damaged.
    """
    file = path / "chat_template.json"
    if not file.exists() or (path / "chat_template.jinja").exists():
        return None
    template = read_object(file).get("chat_template")
    # A list has several templates, by their names.
    if not isinstance(template, str | list | None):
        raise ModelError(f"{file}: damaged, chat_template is no text; fetch it again")
    return template


@contextmanager
def _tiktoken_without_cache(source: ModelSource) -> Iterator[None]:
    """A context without tiktoken's cache, which keeps a folder's file under its path alone.

    Of a folder whose tokenizer.model has changed, it would give the old vocabulary. A model's own
    code may read vocabularies from the network, which need the cache.
    """
    before = os.environ.get(_TIKTOKEN_CACHE)
    if not source.trust_remote_code:
        os.environ[_TIKTOKEN_CACHE] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_TIKTOKEN_CACHE, None)
        else:
            os.environ[_TIKTOKEN_CACHE] = before
