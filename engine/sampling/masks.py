"""Masks of the tokens that rows may choose, as bits: token t is bit t % 32 of word t // 32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
WORD = 32


def free(rows: int, vocabulary: int) -> Bits:
    """A mask ``[rows, words]`` that allows every token."""
    return np.full((rows, -(-vocabulary // WORD)), -1, np.int32)


def allow(row: Bits, token: int) -> None:
    """Sets one token's bit in a row's ``[words]``."""
    row.view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)


def forbid(row: Bits, token: int) -> None:
    """Clears one token's bit in a row's ``[words]``."""
    row.view(np.uint32)[token // WORD] &= ~np.uint32(1 << token % WORD)


def allows(row: Bits, token: int) -> bool:
    """Whether one token's bit is set in a row's ``[words]``."""
    return bool(row.view(np.uint32)[token // WORD] >> np.uint32(token % WORD) & 1)


def masked(logits: mx.array, bits: Bits) -> mx.array:
    """Sets ``logits``, ``[rows, vocabulary]``, to -inf where ``bits``, ``[rows, words]``, are 0."""
    rows, vocabulary = logits.shape
    # NOTE: unpacking bytes instead of words takes half the time on the CPU.
    eights = mx.array(bits.view(np.uint8))[:, :, None]
    allowed = (eights & mx.array(1 << np.arange(8), mx.uint8)) != 0
    return mx.where(allowed.reshape(rows, -1)[:, :vocabulary], logits, -mx.inf)
