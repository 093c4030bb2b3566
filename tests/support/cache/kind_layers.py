"""One layer of a tiny model on any cache, and bit for bit comparisons with mlx-lm's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, QuantizedKVCache, RotatingKVCache

from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import KVPiece, LayerState, StatePiece

HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
# Tokens that the convolution of a recurrent layer looks back.
TAIL = 3


def attention(
    embeddings: mx.array, cache: Any, tokens: np.ndarray, quantization: Quantization | None
) -> mx.array:
    """Attention over what the cache returns.

    Args:
        embeddings: ``[vocabulary, heads, key dim]``; queries, keys and values are made of them.
        tokens: ``[rows, length]``.
        quantization: of the batch's cache; mlx-lm's window caches are rounded the same way.

    Returns:
        ``[rows, length, heads, value dim]`` in float32.
    """
    hidden = embeddings[mx.array(tokens)]
    queries = hidden.swapaxes(1, 2)
    mask = create_attention_mask(hidden, cache)
    fetched = cache.update_and_fetch(queries[..., ::-1], queries[..., :VALUE_DIM] - 0.5)
    if isinstance(cache, QuantizedKVCache | RotatingKVCache):
        assert quantization is not None
        fetched = [_quantized_and_back(array, quantization) for array in fetched]
    queries, keys, values = (array.astype(mx.float32) for array in (queries, *fetched))
    out = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=KEY_DIM**-0.5, mask=mask
    )
    return out.swapaxes(1, 2)


def recurrence(embeddings: mx.array, cache: Any, tokens: np.ndarray) -> mx.array:
    """A convolution, whose tail is slot 0 of the cache, into a decaying state, which is slot 1.

    Returns:
        ``[rows, length, key dim]``.
    """
    inputs = embeddings[mx.array(tokens)][:, :, 0]
    tail, state = cache[0], cache[1]
    if tail is None:
        tail = mx.zeros((len(tokens), TAIL, KEY_DIM), embeddings.dtype)
    if state is None:
        state = mx.zeros((len(tokens), KEY_DIM), mx.float32)
    inputs = mx.concatenate([tail, inputs], axis=1)
    outputs = []
    for i in range(tokens.shape[1]):
        mixed = inputs[:, i] - inputs[:, i + 1] * 0.5 + inputs[:, i + TAIL] * 0.25
        state = state * 0.75 + mixed
        outputs.append(state)
    cache[0], cache[1] = inputs[:, -TAIL:], state
    return mx.stack(outputs, axis=1)


def flat(caches: Sequence[Any]) -> list[Any]:
    """The caches with the parts of each ``CacheList`` in its place."""
    return [
        part
        for cache in caches
        for part in (cache.caches if isinstance(cache, CacheList) else [cache])
    ]


def assert_same_layer(
    piece: LayerState | None,
    cache: Any,
    tokens: int,
    window: int,
    quantization: Quantization | None,
    dtype: mx.Dtype,
) -> None:
    """A row's extracted state equals mlx-lm's cache, bit for bit.

    Args:
        tokens: how many tokens the row has taken.
        window: tokens in the window of a ``RotatingKVCache``; the oldest is not compared, since
            the next step does not need it.
        quantization: of the extracted state.
        dtype: in which keys and values were computed.
    """
    if isinstance(cache, ArraysCache):
        slots = piece.slots if isinstance(piece, StatePiece) else [None] * len(cache.cache)
        _assert_same_states(slots, cache.cache)
        return
    needed = min(tokens, window - 1) if isinstance(cache, RotatingKVCache) else tokens
    if not needed:
        return
    assert isinstance(piece, KVPiece)
    assert piece.tokens >= needed
    for ours, theirs in zip(piece.newest(needed).arrays, _keys_and_values(cache), strict=True):
        if quantization is None:
            assert np.array_equal(_bits(ours), _bits(theirs))
        else:
            _assert_same_packed(ours, theirs, needed, quantization, dtype)


def _assert_same_packed(
    packed: mx.array, theirs: Any, tokens: int, quantization: Quantization, dtype: mx.Dtype
) -> None:
    """Codes, scales and biases are MLX's, and so are the numbers that they stand for."""
    bits, group = quantization.bits, quantization.group
    if not isinstance(theirs, tuple):
        theirs = mx.quantize(theirs[:, :, -tokens:], group_size=group, bits=bits)
    codes = theirs[0].shape[-1]
    scales, biases = mx.split(packed[..., codes:].view(dtype), 2, axis=-1)
    ours = (packed[..., :codes], scales, biases)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(_bits(one), _bits(other))
    unpacked = quantization.unpack(packed, codes * 32 // bits, dtype)
    expected = mx.dequantize(*theirs, group_size=group, bits=bits)
    assert np.array_equal(_bits(unpacked), _bits(expected))


def _quantized_and_back(array: Any, quantization: Quantization) -> mx.array:
    """An array rounded by quantization; mlx-lm's caches may return it quantized already."""
    options = {"group_size": quantization.group, "bits": quantization.bits}
    if isinstance(array, mx.array):
        array = mx.quantize(array, **options)
    return mx.dequantize(*array, **options)


def _keys_and_values(cache: Any) -> tuple[Any, Any]:
    """Keys and values, oldest first; a quantized cache's as codes, scales and biases."""
    if isinstance(cache, RotatingKVCache):
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    if isinstance(cache, QuantizedKVCache):
        keys, values = cache.keys_and_values()
        return tuple(keys), tuple(values)
    return cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]


def _assert_same_states(ours: Sequence[mx.array | None], theirs: Sequence[mx.array | None]) -> None:
    """Bit for bit; None and zeros are the same, since a model starts from zeros."""
    for one, two in zip(ours, theirs, strict=True):
        if one is None or two is None:
            assert all(slot is None or not slot.any() for slot in (one, two))
        else:
            assert np.array_equal(_bits(one), _bits(two))


def _bits(array: mx.array) -> np.ndarray:
    """The memory of an array as integers, so that equal means equal to the bit."""
    words = {4: mx.uint32, 2: mx.uint16}[array.dtype.size]
    return np.array(array.view(words))
