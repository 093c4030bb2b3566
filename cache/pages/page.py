"""The size of a page."""

from __future__ import annotations

# The token at position p of a sequence is in the sequence's page p // PAGE_TOKENS. The CUDA kernels
# read columns in tiles of this many.
PAGE_TOKENS = 64
