"""The size of a page."""

from __future__ import annotations

# Tokens of a page: page ``i`` of a sequence holds its positions [64 i, 64 i + 64).
PAGE_TOKENS = 64
