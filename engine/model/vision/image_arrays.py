"""The arrays of an image in the form in which they travel to the engine, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Array

_BFLOAT16 = "bfloat16"


def array_of(value: Any) -> Array:
    """An array in a message.

    Raises:
        RequestError: it is ragged.
    """
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        bits = np.asarray(value.view(mx.uint16))
        return Array(_BFLOAT16, bits.shape, bits.tobytes())
    array = np.ascontiguousarray(np.asarray(value))
    if array.dtype == object:
        raise RequestError("messages: the images have no common size", "messages")
    if array.dtype == np.float64:  # which MLX makes float32, too
        array = array.astype(np.float32)
    return Array(str(array.dtype), array.shape, array.tobytes())


def digest_of(arrays: Mapping[str, Array]) -> bytes:
    """SHA-256 over the arrays of an image."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype, array.shape)).encode())
        digest.update(array.data)
    return digest.digest()


def numpy_of(array: Array) -> np.ndarray[Any, Any]:
    """An array of a message; elements of bfloat16 are the same bits in uint16."""
    return np.frombuffer(array.data, array.held_as).reshape(array.shape)


def mlx_of(array: Array) -> mx.array:
    """An array of a message."""
    elements = mx.array(numpy_of(array))
    return elements.view(mx.bfloat16) if array.dtype == _BFLOAT16 else elements
