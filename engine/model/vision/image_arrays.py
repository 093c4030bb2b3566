"""The arrays of an image in the form in which they travel to the engine, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Array
from chairlift.engine.model.vision.processing import Processing

# What processors return besides the arrays of images.
_OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
)
_BFLOAT16 = "bfloat16"


def arrays_of(inputs: Mapping[str, Any], processing: Processing, first: int) -> dict[str, Array]:
    """The arrays of one image by the names of the model's parameters.

    An array of a list has the name of the list and its number, with a dot between.

    Args:
        inputs: what the processor returned for the image alone.
        first: the place of the image's first token.

    Raises:
        RequestError: an array is ragged.
    """
    if processing.records:
        inputs = _parts(inputs["pixel_values"][0][0])
    # mlx-vlm renames this, too.
    named = {"pixel_values" if name == "images" else name: v for name, v in inputs.items()}
    if processing.arrays is None:
        kept = {name: value for name, value in named.items() if name not in _OF_TEXT}
    else:
        kept = {name: value for name, value in named.items() if name in processing.arrays}
    arrays: dict[str, Array] = {}
    for name, value in kept.items():
        if _is_empty(value):
            continue
        if name in processing.numbering:
            numbers = np.asarray(value)
            value = np.where(numbers < 0, numbers, numbers - first)
        if name == processing.padded:
            value = _padded(np.asarray(value), len(kept["pixel_values"][0]))
        if name in processing.lists:
            leaves: Any = tree_flatten({name: value})
            arrays |= {path: _array(each) for path, each in leaves}
        else:
            arrays[name] = _array(value)
    return arrays


def _parts(record: Any) -> dict[str, Any]:
    """The arrays of a record, which ``ImageInputs`` makes of them again."""
    sides = [record.n_vit_h, record.n_vit_w]
    return {"patches": record.patches, "sides": sides, "types": record.types}


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


def _array(value: Any) -> Array:
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        bits = np.asarray(value.view(mx.uint16))
        return Array(_BFLOAT16, bits.shape, bits.tobytes())
    array = np.ascontiguousarray(np.asarray(value))
    if array.dtype == object:
        raise RequestError("messages: the images have no common size", "messages")
    return Array(str(array.dtype), array.shape, array.tobytes())


def _is_empty(value: Any) -> bool:
    """Whether it says nothing, like a list with nothing for an image."""
    return value is None or (isinstance(value, list) and all(each is None for each in value))


def _padded(array: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    more = np.zeros((array.shape[0], length - array.shape[1], *array.shape[2:]), array.dtype)
    return np.concatenate([array, more], axis=1)
