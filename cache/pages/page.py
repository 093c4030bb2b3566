"""The size of a page, and the number of pages of some tokens."""

from __future__ import annotations

# Tokens of a page. Attention looks up one table entry for this many tokens, and half a page of each
# sequence is unused on average.
PAGE_TOKENS = 64


def page_count(tokens: int) -> int:
    """Pages that hold the first ``tokens`` tokens of a sequence."""
    return -(-tokens // PAGE_TOKENS)
