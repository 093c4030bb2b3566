"""The tokens of a long text, in a worker process."""

from __future__ import annotations

from array import array

from tokenizers import Tokenizer


def load_tokenizer(text: str) -> Tokenizer:
    """A tokenizer of the tokenizers library, from its JSON."""
    tokenizer = Tokenizer.from_str(text)
    # A model's file may ask for either; nothing here wants them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> array[int]:
    """The same ids as ``PreTrainedTokenizerFast.encode`` gives."""
    return array("I", tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
