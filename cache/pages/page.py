"""The size of a page."""

from __future__ import annotations

# Tokens of a page. Attention looks up one table entry for this many tokens, and half a page of each
# sequence is unused on average.
PAGE_TOKENS = 64
