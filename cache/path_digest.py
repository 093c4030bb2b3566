"""Digests of token paths: they name a prefix in files, also between servers.

A digest is SHA-256 over the salt's own digest and the tokens as little-endian int32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class PathDigest:
    """The digest of a path, initially empty; a continuation does not hash the path again.

    Attributes:
        salt: the salt's digest.
    """

    __slots__ = ("_hash", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt_digest(salt)
        self._hash = hashlib.sha256(self.salt.encode())

    def continued(self, tokens: Sequence[int]) -> PathDigest:
        """The digest of this path followed by ``tokens``; this one is unchanged."""
        after = PathDigest.__new__(PathDigest)
        after.salt, after._hash = self.salt, self._hash.copy()
        after._hash.update(int32(tokens).data)
        return after

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._hash.hexdigest()


def salt_digest(salt: str) -> str:
    """The salt as files record it: 64 hexadecimal digits."""
    return hashlib.sha256(salt.encode()).hexdigest()


def prefix_digests(salt: str, tokens: Ids, positions: Sequence[int]) -> list[str]:
    """The digest of ``tokens[:position]`` under a salt's digest, for ascending positions."""
    digest = hashlib.sha256(salt.encode())
    digests, done = [], 0
    for position in positions:
        digest.update(int32(tokens[done:position]).data)
        digests.append(digest.hexdigest())
        done = position
    return digests


def int32(tokens: Any) -> Ids:
    """Token ids in the files' format; shares the array's memory if it has that format already."""
    return np.ascontiguousarray(np.asarray(tokens, "<i4"))
