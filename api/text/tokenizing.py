"""Tokenizes long texts in a worker process."""

from __future__ import annotations

from array import array

from tokenizers import Tokenizer


def load_tokenizer(text: str) -> Tokenizer:
    """Builds a tokenizer of the tokenizers library from its JSON."""
    tokenizer = Tokenizer.from_str(text)
    # A model's file may turn either on; a prompt must be encoded as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> array[int]:
    """The token ids of ``text``, equal to those of ``PreTrainedTokenizerFast.encode``."""
    return array("I", tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
