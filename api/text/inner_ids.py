"""Token ids of a text behind another: without the space that SentencePiece puts in front."""

from __future__ import annotations

from typing import Any


def puts_space(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a space before the beginning of a text, as SentencePiece does."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids)[0]  # of some tokenizers, bytes
    return bool(first[:1] == "▁")


def without_line_break(tokenizer: Any, ids: list[int]) -> list[int] | None:
    """The ids of a text without the line break, and the space, at its beginning.

    None if the line break is part of a token with more.
    """
    line = list(tokenizer.encode("\n", add_special_tokens=False))
    return ids[len(line) :] if ids[: len(line)] == line else None


def inner_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text behind another, without the space before a beginning."""
    if puts_space(tokenizer):
        ids = list(tokenizer.encode("\n" + text, add_special_tokens=False))
        if (rest := without_line_break(tokenizer, ids)) is not None:
            return rest
    return list(tokenizer.encode(text, add_special_tokens=False))
