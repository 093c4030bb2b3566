"""What processors make of an image, for each type: random arrays, and the image's tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx.utils import tree_flatten, tree_map

from chairlift.engine.messages import Array, PromptImage
from conformance.vision.values import END_ID, IMAGE_ID, MERGE, PATCH, SIDE, START_ID, TEXT_VOCAB

Arrays = dict[str, Any]
Draw = np.random.Generator


@dataclass(frozen=True, slots=True)
class Form:
    """Images as a type's processor prepares them.

    Attributes:
        make: makes the arrays of an image, and returns the number of its embeddings.
        joined: the arrays of several images of a prompt.
        most: how many images mlx-vlm's own code takes in one prompt, 3 at most.
        contracted: mlx-vlm takes so many tokens for an image, instead of one for each embedding.
        unchunked: mlx-vlm's generation of prompts in chunks fails.
        whole: a prompt has to be in one chunk.
        lead: mlx-vlm takes an image behind so many tokens only.
        records: makes of a prompt's arrays what mlx-vlm's code takes.
    """

    make: Callable[[Draw], tuple[Arrays, int]]
    joined: Callable[[list[Arrays]], Arrays] = lambda images: concatenated(images)
    most: int = 3
    contracted: int | None = None
    unchunked: bool = False
    whole: bool = False
    mark: int = IMAGE_ID
    positions: tuple[str, ...] = ()
    derived: Callable[[list[int]], Arrays] = lambda tokens: {}
    lead: int | None = None
    records: Callable[[Arrays], Arrays] = lambda arrays: arrays
    before: tuple[int, ...] = (START_ID,)
    after: tuple[int, ...] = (END_ID,)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the engine, and the same for mlx-vlm."""

    tokens: list[int]
    images: tuple[PromptImage, ...]
    theirs: list[int]
    arrays: Arrays


def random_prompt(form: Form, draw: random.Random, images: int, seeds: list[int]) -> Prompt:
    """Random texts around so many images, which are drawn from these seeds."""
    tokens: list[int] = []
    theirs: list[int] = []
    placed: list[PromptImage] = []
    arrays: list[Arrays] = []
    for number in range(images + 1):
        if number:
            made, count = form.make(np.random.default_rng(draw.choice(seeds)))
            start = len(theirs) + len(form.before)
            tokens += [*form.before, *[IMAGE_ID] * count, *form.after]
            theirs += [*form.before, *[form.mark] * (form.contracted or count), *form.after]
            end = len(tokens) - len(form.after)
            placed.append(_prompt_image(made, list(range(end - count, end))))
            moved = {
                name: np.where(made[name] < 0, -1, made[name] + start) for name in form.positions
            }
            arrays.append(made | moved)
        leads = form.lead is not None and images > 0 and number == 0
        fewest = 0 if number < images else 1
        length = form.lead if leads else draw.choice([fewest, 3, 20])
        text = [draw.randrange(3, TEXT_VOCAB) for _ in range(length)]
        tokens += text
        theirs += text
    return Prompt(
        tokens, tuple(placed), theirs, form.joined(arrays) | form.derived(theirs) if arrays else {}
    )


def _prompt_image(arrays: Arrays, places: list[int]) -> PromptImage:
    flat = {n: np.ascontiguousarray(a) for n, a in tree_flatten(arrays)}
    digest = hashlib.sha256(b"".join(array.tobytes() for array in flat.values())).digest()
    return PromptImage(
        digest,
        places,
        {name: Array(str(a.dtype), a.shape, a.tobytes()) for name, a in flat.items()},
    )


def concatenated(images: list[Arrays], axis: int = 0) -> Arrays:
    first, *rest = images
    return tree_map(lambda *same: np.concatenate(same, axis=axis), first, *rest)


def square(
    tokens: int,
    side: int = SIDE,
    tiles: int = 1,
    axes: int = 4,
    channels_last: bool = False,
    more: Callable[[int], Arrays] = lambda tiles: {},
    **settings: Any,
) -> Form:
    """Images of one size, ``[1, 3, side, side]``; up to ``tiles`` of them for an image.

    ``axes`` of 5 puts an axis for the batch in front.
    """

    def make(draw: Draw) -> tuple[Arrays, int]:
        count = int(draw.integers(1, tiles + 1))
        pixels = draw.normal(size=(count, 3, side, side)).astype(np.float32)
        pixels = pixels.transpose(0, 2, 3, 1) if channels_last else pixels
        return {
            "pixel_values": pixels[None] if axes == 5 else pixels,
            **more(count),
        }, tokens * count

    joined = (lambda images: concatenated(images, 1)) if axes == 5 else concatenated
    return Form(make, joined, **settings)


def grid(
    patch: int | tuple[int, ...] = 3 * 2 * PATCH * PATCH,
    name: str = "image_grid_thw",
    axes: int = 3,
    merge: int = MERGE,
    batched: bool = False,
    by_row: int = 0,
    by_image: int = 0,
    **settings: Any,
) -> Form:
    """Images of any size as a list of patches, with their number in time, height and width."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        height, width = draw.integers(1, 4, 2).tolist()
        sides = [1, merge * height, merge * width][-axes:]
        shape = patch if isinstance(patch, tuple) else (patch,)
        pixels = draw.normal(size=(merge * height * merge * width, *shape)).astype(np.float32)
        pixels = pixels[None] if batched else pixels
        return {"pixel_values": pixels, name: np.array([sides], np.int64)}, height * (
            width + by_row
        ) + by_image

    def joined(images: list[Arrays]) -> Arrays:
        pixels = np.concatenate([image["pixel_values"] for image in images], int(batched))
        return {name: np.concatenate([image[name] for image in images]), "pixel_values": pixels}

    return Form(make, joined, **settings)
