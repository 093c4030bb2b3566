"""The arrays of a processor's output from which an image's embeddings are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from chairlift.engine.messages import Array
from chairlift.engine.model.vision.families import Family
from chairlift.engine.model.vision.image_arrays import array_of
from chairlift.engine.model.vision.processors.processing import Processing

# The names of the arrays that processors return besides those of images.
_OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
)


def arrays_of(
    inputs: Mapping[str, Any], processing: Processing, family: Family, first: int
) -> dict[str, Array]:
    """The arrays of one image by the names of the model's parameters.

    An array of a list has the name of the list and its number, with a dot between.

    Args:
        inputs: what the processor returned for the image alone.
        first: the place of the image's first token.

    Raises:
        RequestError: an array is ragged.
    """
    if family.derived == "records":
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
            arrays |= {path: array_of(each) for path, each in leaves}
        else:
            arrays[name] = array_of(value)
    return arrays


def _parts(record: Any) -> dict[str, Any]:
    """The arrays of a record, which ``ImageInputs`` makes of them again."""
    sides = [record.n_vit_h, record.n_vit_w]
    return {"patches": record.patches, "sides": sides, "types": record.types}


def _is_empty(value: Any) -> bool:
    """Whether it says nothing, like a list with nothing for an image."""
    return value is None or (isinstance(value, list) and all(each is None for each in value))


def _padded(array: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    more = np.zeros((array.shape[0], length - array.shape[1], *array.shape[2:]), array.dtype)
    return np.concatenate([array, more], axis=1)
