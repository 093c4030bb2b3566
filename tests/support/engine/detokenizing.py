"""Texts, and streaming them through a detokenizer."""

from __future__ import annotations

from typing import Any

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


def streamed_text(tokenizer: Any, ids: list[int]) -> str:
    """Detokenizes token by token, checks the segments, and returns the text."""
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == detokenizer.text
    assert detokenizer.tokens == ids
    # A segment never ends within a character, except at the end of the text.
    assert not any("\ufffd" in segment for segment in segments) or "\ufffd" in detokenizer.text
    return detokenizer.text
