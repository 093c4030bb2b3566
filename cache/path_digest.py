"""Digests of the tokens that lead somewhere: they name a path in files, and for other servers.

SHA-256 over the salt's own digest and the tokens as little-endian int32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class PathDigest:
    """The digest of a path, by default of no tokens; its continuation does not hash it again.

    ``salt`` is the salt's digest.
    """

    __slots__ = ("_hash", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt_digest(salt)
        self._hash = hashlib.sha256(self.salt.encode())

    def continued(self, tokens: Sequence[int]) -> PathDigest:
        """The digest with ``tokens`` behind the path's end; this one stays as it is."""
        after = PathDigest.__new__(PathDigest)
        after.salt, after._hash = self.salt, self._hash.copy()
        after._hash.update(int32(tokens).data)
        return after

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._hash.hexdigest()


def salt_digest(salt: str) -> str:
    """What a file tells of a salt: 64 hexadecimal digits."""
    return hashlib.sha256(salt.encode()).hexdigest()


def prefix_digests(salt: str, tokens: Ids, positions: Sequence[int]) -> list[str]:
    """What identifies ``tokens[:position]`` under a salt's digest, for each of rising positions."""
    digest = hashlib.sha256(salt.encode())
    digests, done = [], 0
    for position in positions:
        digest.update(int32(tokens[done:position]).data)
        digests.append(digest.hexdigest())
        done = position
    return digests


def int32(tokens: Any) -> Ids:
    """Token ids as files have them, in memory of their own or the array's."""
    return np.ascontiguousarray(np.asarray(tokens, "<i4"))
