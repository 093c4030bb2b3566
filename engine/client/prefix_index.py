"""Remembers which prefixes an engine was sent: hashes of blocks of token ids, oldest dropped first.

Block k's hash covers the tokens of all blocks up to k, so one look-up for each block finds the
longest prefix. A collision or a prefix that the engine has evicted costs time, never a wrong token:
the engine itself decides what its cache has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from chairlift.engine.messages import Submit
from chairlift.engine.messages.images import prompt_keys

# Tokens of a block. Prefixes are found up to a multiple of this.
BLOCK = 64
# A block takes about 81 bytes here, and up to 120 just after the table has grown: at most 16 MB.
MAX_BLOCKS = 1 << 17
_HASH_BYTES = 8
# A request that differs in one of these shares no prefix in the engine's cache.
_KEY_FIELDS = ("cache_salt", "adapter")


def block_hashes(request: Submit) -> list[bytes]:
    """The hashes of the whole blocks of a request's prompt; at most those that MAX_BLOCKS allows.

    The last token is left out: the engine always computes it.
    """
    last = b""
    for name in _KEY_FIELDS:
        value = str(getattr(request, name)).encode("utf-8", "surrogatepass")
        last += hashlib.blake2b(value, digest_size=_HASH_BYTES).digest()
    blocks = max(0, min((len(request.prompt) - 1) // BLOCK, MAX_BLOCKS))
    try:
        keys = prompt_keys(request.prompt, request.images)[: blocks * BLOCK]
        ids = memoryview(keys).cast("B")
    except OverflowError:
        return []  # no token has such an id; the engine refuses the request
    size = BLOCK * 8
    hashes = []
    for start in range(0, len(ids), size):
        block = hashlib.blake2b(last, digest_size=_HASH_BYTES)
        block.update(ids[start : start + size])
        hashes.append(last := block.digest())
    return hashes


class PrefixIndex:
    """The prefixes of one engine, at most ``capacity`` blocks."""

    def __init__(self, capacity: int = MAX_BLOCKS) -> None:
        self._capacity = capacity
        # In the order of their last use.
        self._blocks: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def resize(self, capacity: int) -> None:
        """Sets the number of blocks that the engine's cache holds."""
        self._capacity = min(max(0, capacity), MAX_BLOCKS)
        self._trim()

    def match(self, hashes: Sequence[bytes]) -> int:
        """The number of tokens of the longest known prefix."""
        known = 0
        for known, block in enumerate(hashes):
            if block not in self._blocks:
                return known * BLOCK
        return (known + 1) * BLOCK if hashes else 0

    def add(self, hashes: Sequence[bytes]) -> None:
        """Adds a prompt's blocks, or marks them as just used."""
        # A block is of no use without those before it, so these are dropped later.
        for block in reversed(hashes):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        self._trim()

    def clear(self) -> None:
        """Forgets all, because the engine has."""
        self._blocks.clear()

    def _trim(self) -> None:
        while len(self._blocks) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
