"""The images of a prompt, as a model's processor prepared them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Array(msgspec.Struct, array_like=True, frozen=True):
    """An array of numbers.

    Attributes:
        dtype: NumPy's name of the type of its elements, or "bfloat16".
        data: the elements in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def held_as(self) -> str:
        """NumPy's name of a type whose elements have these bytes: it has no bfloat16."""
        return "uint16" if self.dtype == "bfloat16" else self.dtype


class PromptImage(msgspec.Struct, array_like=True, frozen=True):
    """An image of a prompt.

    Attributes:
        digest: SHA-256 over ``own`` and ``arrays``: equal images have equal embeddings.
        places: where its tokens are in the prompt, ascending; one for each of its embeddings.
        arrays: what the processor made of its pixels, by the names of the model's parameters.
    """

    digest: bytes
    places: list[int]
    arrays: dict[str, Array]

    @property
    def span(self) -> slice:
        """The part of the prompt from its first token to its last."""
        return slice(self.places[0], self.places[-1] + 1)


class ImageSource(NamedTuple):
    """An image of a request.

    Attributes:
        data: its file.
        media_type: the type that the client says it has; None if it says nothing.
        detail: with "low" it is scaled down.
    """

    data: bytes
    media_type: str | None
    detail: str


class ImagePrompt(NamedTuple):
    """The tokens of a prompt, and its images."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()


def prompt_keys(
    prompt: Sequence[int], images: Sequence[PromptImage], together: Sequence[range] = ()
) -> array[int]:
    """The prompt with a number of its own in place of each token of an image.

    Prompts with equal keys have equal embeddings, so the prefix cache compares these. The numbers
    are negative, hence no token ids, and follow from the image's digest.

    Args:
        together: tokens that see each other. Those in front of an image, which see it, have such
            numbers, too.
    """
    keys = array("q", prompt)
    end = 0
    for image in images:
        first = image.places[0]
        seeing = [max(run.start, end) for run in together if first in run]
        places = [*range(min(seeing, default=first), first), *image.places]
        end = places[-1] + 1
        stream = hashlib.shake_128(image.digest).digest(4 * len(places))
        for number, place in enumerate(places):
            drawn = int.from_bytes(stream[4 * number : 4 * number + 4], "little")
            # Files of prefixes contain tokens of 32 bits.
            keys[place] = -1 - (drawn >> 1)
    return keys
