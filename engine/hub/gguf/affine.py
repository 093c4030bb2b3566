"""Blocks of GGML's quantizations as groups of MLX's affine one: ``scale * code + bias``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType

# Weights of a group.
GROUP = 32
# The bits of a code in MLX. Scales and biases are float16 numbers, or a power of two times one.
_BITS = {GGMLType.Q4_0: 4, GGMLType.Q4_1: 4, GGMLType.Q8_0: 8}
# The same for types whose scales and biases are products, which float32 holds exactly.
_BITS_IN_FLOAT32 = {GGMLType.Q4_K: 4, GGMLType.Q5_K: 8}
# Groups of a block of these types, and the bytes of their scales and biases.
_GROUPS, _FACTORS = 8, 12

Blocks = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def packed_bits(type_: GGMLType, dtype: mx.Dtype) -> int | None:
    """The bits of MLX's codes for a type of blocks; None if it has to be dequantized.

    Args:
        dtype: that of scales and biases.
    """
    more = _BITS_IN_FLOAT32 if dtype == mx.float32 else {}
    return (_BITS | more).get(type_)


def pack_affine(rows: Blocks, type_: GGMLType) -> tuple[mx.array, mx.array, mx.array]:
    """Converts blocks, ``[rows, bytes]``, to MLX's weights, scales and biases.

    The conversion is exact. The scale and Q4_1's bias are the block's float16 numbers. The bias of
    Q4_0 (-8 scales) and of Q8_0 (-128 scales) is the scale times a power of two. As Q8_0's bias can
    exceed float16's range, scales and biases are float32. Those of Q4_K and Q5_K are six bits each,
    times the block's two float16 numbers.
    """
    n = rows.shape[0]
    if type_ in _BITS_IN_FLOAT32:
        codes, scales, biases = _unpacked_k(rows, type_)
    elif type_ == GGMLType.Q8_0:
        blocks = rows.reshape(n, -1, 2 + GROUP)
        scales = _float16_at(blocks, 0)
        biases = -128.0 * scales
        # Two's complement to offset binary: int8 q as uint8 q + 128.
        codes = blocks[..., 2:] ^ np.uint8(0x80)
    else:
        header = 2 if type_ == GGMLType.Q4_0 else 4
        blocks = rows.reshape(n, -1, header + GROUP // 2)
        scales = _float16_at(blocks, 0)
        biases = -8.0 * scales if type_ == GGMLType.Q4_0 else _float16_at(blocks, 2)
        # In GGML, low nibbles are weights 0-15, high ones 16-31.
        packed = blocks[..., header:]
        codes = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    if packed_bits(type_, mx.float32) == 4:
        # In MLX, a byte has two neighbours.
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    words = np.ascontiguousarray(codes).reshape(n, -1).view("<u4")
    return mx.array(words), mx.array(scales), mx.array(biases)


def _unpacked_k(rows: Blocks, type_: GGMLType) -> tuple[Blocks, Floats, Floats]:
    """The codes ``[rows, groups, 32]``, scales and biases ``[rows, groups]`` of Q4_K or Q5_K.

    A block is two float16 numbers, the groups' factors, for Q5_K the high bit of each code, and
    the low four bits: 32 bytes hold those of one group, and in their high halves the next one's.
    """
    n, half = rows.shape[0], GROUP * _GROUPS // 2
    high_bytes = GROUP if type_ == GGMLType.Q5_K else 0
    blocks = rows.reshape(n, -1, 4 + _FACTORS + high_bytes + half)
    factors, least = _factors(blocks[..., 4 : 4 + _FACTORS])
    scales = _float16_at(blocks, 0)[..., None] * factors
    biases = -_float16_at(blocks, 2)[..., None] * least
    low = blocks[..., -half:].reshape(n, -1, _GROUPS // 2, 1, GROUP)
    codes = np.concatenate([low & 0x0F, low >> 4], axis=3).reshape(n, -1, _GROUPS, GROUP)
    if high_bytes:
        high = blocks[..., 4 + _FACTORS : 4 + _FACTORS + high_bytes]
        bits = high[..., None, :] >> np.arange(_GROUPS, dtype=np.uint8)[:, None] & 1
        codes |= bits << 4
    return codes.reshape(n, -1, GROUP), scales.reshape(n, -1), biases.reshape(n, -1)


def _factors(packed: Blocks) -> tuple[Blocks, Blocks]:
    """Two numbers of six bits for each of the eight groups of a block, ``[..., 12]`` bytes.

    The first four groups' are in the first bytes; the other groups' low four bits are in the last
    four bytes, and their high bits are in the first bytes' highest ones.
    """
    first, second, both = np.split(packed, 3, axis=-1)
    scales = np.concatenate([first & 0x3F, both & 0x0F | first >> 2 & 0x30], axis=-1)
    least = np.concatenate([second & 0x3F, both >> 4 | second >> 2 & 0x30], axis=-1)
    return scales, least


def _float16_at(blocks: Blocks, byte: int) -> Floats:
    field = np.ascontiguousarray(blocks[..., byte : byte + 2])
    numbers: Floats = field.view("<f2")[..., 0].astype(np.float32)
    return numbers
