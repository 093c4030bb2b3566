"""Loads the tokenizer of any model source, with its chat template and end-of-text ids."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config
from mlx_lm.utils import load_tokenizer as load_directory

from chairlift.engine.errors import ModelError
from chairlift.engine.gguf.file import GGUFFile
from chairlift.engine.gguf.tokenizer import load_gguf_tokenizer
from chairlift.engine.hub.folder_check import check_tokenizer_files
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.detokenizer import byte_detokenizer


def load_tokenizer(source: ModelSource) -> TokenizerWrapper:
    """Loads a tokenizer in mlx-lm's wrapper. Each access to its ``detokenizer`` makes a new one.

    Raises:
        ModelError: the tokenizer is missing or damaged.
        UnsupportedModel: the kind of tokenizer is not supported.
    """
    if source.kind == "gguf":
        tokenizer = load_gguf_tokenizer(GGUFFile(source.path))
    else:
        tokenizer = _from_directory(source)
    # NOTE: mlx-lm's loaders have no parameter for a detokenizer. The wrapper copies this one.
    if (detokenizer := byte_detokenizer(tokenizer)) is not None:
        tokenizer._detokenizer = detokenizer
    return tokenizer


def _from_directory(source: ModelSource) -> TokenizerWrapper:
    try:
        config = load_config(source.path)
        ends = config.get("eos_token_id")
        if ends is None:
            ends = (config.get("text_config") or {}).get("eos_token_id")
        extra = {"trust_remote_code": source.trust_remote_code}
        return load_directory(source.path, extra, eos_token_ids=ends)
    except Exception as error:  # transformers raises any of its parsers' exceptions
        check_tokenizer_files(source.path)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # The line after "Validation error for field 'eos_token_id':" has the reason.
        cause = " ".join(line.strip() for line in lines[:2])[:300]
        raise ModelError(f"{source.path}: the tokenizer cannot be loaded: {cause}") from error
