"""Images in the forms of single processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from conformance.vision.forms import Arrays, Draw, Form, concatenated, grid, square
from conformance.vision.values import END_ID, IMAGE_ID, MERGE, PATCH, SIDE


def idefics(tokens: int, *_: str) -> Form:
    """Up to three tiles for an image, side by side, with a mask of their pixels."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        tiles = int(draw.integers(1, 4))
        return {
            "pixel_values": draw.normal(size=(1, tiles, 3, SIDE, SIDE)).astype(np.float32),
            "pixel_attention_mask": np.ones((1, tiles, SIDE, SIDE), np.int64),
        }, tokens * tiles

    return Form(make, lambda images: concatenated(images, 1))


def sized(patch: int, most_patches: int = 36, merge: int = MERGE, **settings: Any) -> Form:
    """Images of any size, padded to a number of patches, with a mask and their sides."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        height, width = draw.integers(1, 4, 2).tolist()
        sides = [MERGE * height, MERGE * width]
        count = sides[0] * sides[1]
        pixels = draw.normal(size=(1, most_patches, patch)).astype(np.float32)
        pixels[:, count:] = 0
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": (np.arange(most_patches) < count).astype(np.int64)[None],
            "spatial_shapes": np.array([sides], np.int64),
        }, count // merge**2

    return Form(make, **settings)


def soft_tokens(tokens: int) -> Form:
    """Images as patches with their places, one for each embedding."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        places = np.stack([np.arange(tokens) % MERGE, np.arange(tokens) // MERGE], -1)
        return {
            "pixel_values": draw.normal(size=(1, tokens, 3 * PATCH * PATCH)).astype(np.float32),
            "image_position_ids": places[None],
        }, tokens

    return Form(make, derived=image_types)


def patches(most: int) -> Form:
    """Images as patches in two frames, one for each embedding."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        count = int(draw.integers(1, most + 1))
        return {
            "pixel_values": draw.normal(size=(count, 2, PATCH, PATCH, 3)).astype(np.float32)
        }, count

    return Form(make)


def with_sides(tokens: int) -> Form:
    """Images of one size, and their sides in pixels."""
    return square(tokens, more=lambda tiles: {"image_sizes": np.array([[SIDE, SIDE]])})


def anyres(tokens: int) -> Form:
    """Images in two tiles with an axis for images, and their sides in pixels."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        pixels = draw.normal(size=(1, 2, 3, SIDE, SIDE)).astype(np.float32)
        return {"pixel_values": pixels, "image_sizes": np.array([[SIDE, SIDE]])}, tokens

    return Form(make)


def sequence_mask(tokens: list[int]) -> Arrays:
    """Which tokens are an image's."""
    return {"images_seq_mask": np.array([[token == IMAGE_ID for token in tokens]])}


def bounds(tokens: list[int]) -> Arrays:
    """Where each image's tokens begin and end."""
    places = np.flatnonzero(np.array(tokens) == IMAGE_ID)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return {"image_bound": np.array([[(run[0], run[-1] + 1) for run in runs]])}


def deepseek(tokens: int) -> Form:
    """An image in a global view and one tile."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        pixels = draw.normal(size=(1, 2, 3, SIDE, SIDE)).astype(np.float32)
        crops = np.zeros((1, 2, 2), np.int64)
        crops[0, 0] = 1
        return {"pixel_values": pixels, "images_spatial_crop": crops}, tokens

    def joined(images: list[Arrays]) -> Arrays:
        crops = np.zeros((1, 2 * len(images), 2), np.int64)
        crops[0, : len(images)] = 1
        pixels = np.concatenate([image["pixel_values"] for image in images], 1)
        return {"pixel_values": pixels, "images_spatial_crop": crops}

    return Form(make, joined, derived=sequence_mask)


def deepseek_ocr(tokens: int, side: int, most: int) -> Form:
    """An image in a global view, without tiles."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        views = [np.zeros((1, 3, side, side), np.float32), draw.normal(size=(1, 3, side, side))]
        crops = np.ones((1, 2), np.int64)
        return {
            "pixel_values": [views[0], views[1].astype(np.float32)],
            "images_spatial_crop": crops,
        }, tokens

    return Form(make, most=most, derived=sequence_mask)


def deepseek_records() -> Form:
    """Images of any size as records; a token begins it, ends it, and ends each of its rows."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        height, width = draw.integers(1, 4, 2).tolist()
        types = [0, *([1] * width + [2]) * height, 3]
        sides = [MERGE * height, MERGE * width]
        return {
            "patches": draw.normal(size=(sides[0] * sides[1], 3, PATCH, PATCH)).astype(np.float32),
            "sides": np.array(sides),
            "types": np.array(types),
            "start": np.zeros(1, np.int64),
        }, len(types)

    def records(arrays: Arrays) -> Arrays:
        if not arrays:
            return {}
        made = [
            SimpleNamespace(
                start=image["start"].item(),
                patches=image["patches"],
                n_vit_h=image["sides"][0].item(),
                n_vit_w=image["sides"][1].item(),
                types=image["types"].tolist(),
            )
            for image in arrays["images"]
        ]
        return {"pixel_values": [made]}

    return Form(
        make,
        lambda images: {"images": images},
        positions=("start",),
        before=(),
        after=(),
        records=records,
    )


def minicpm(merged: int | None, queries: int = 0) -> Form:
    """Images of any size as a strip of patches, in a list for each prompt."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        unit = merged or 1
        height, width = (unit * draw.integers(1, 4, 2)).tolist()
        pixels = draw.normal(size=(3, PATCH, PATCH * height * width)).astype(np.float32)
        count = queries or height * width // unit**2
        return {"pixel_values": [[pixels]], "tgt_sizes": np.array([[[height, width]]])}, count

    def joined(images: list[Arrays]) -> Arrays:
        return {
            "pixel_values": [[image["pixel_values"][0][0] for image in images]],
            "tgt_sizes": np.concatenate([image["tgt_sizes"] for image in images], 1),
        }

    return Form(make, joined, derived=bounds)


def indexed(crop: int, patch: int, masks: bool = True) -> Form:
    """Images in up to two crops, and where each of their embeddings belongs."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        crops = int(draw.integers(1, 3))
        side = crop // PATCH
        count = crops * (side // 2) ** 2
        # The last place of each crop is unused.
        places = np.arange(count).reshape(1, crops, -1)
        places[..., -1] = -1
        used = places >= 0
        places[used] = np.arange(used.sum())
        return {
            "pixel_values": draw.normal(size=(1, crops, side**2, patch)).astype(np.float32),
            "image_masks": np.ones((1, crops, side**2), np.float32),
            "image_input_idx": places,
        }, int(used.sum())

    return Form(make, lambda images: concatenated(images, 1), positions=("image_input_idx",))


def phi3() -> Form:
    """An image of one tile and a global view, of the only size."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        pixels = draw.normal(size=(1, 2, 3, 336, 336)).astype(np.float32)
        return {"pixel_values": pixels, "image_sizes": np.array([[336, 336]])}, 313

    return Form(make, mark=-1)


def pooled(crop: int, patch: int) -> Form:
    """Images in a low and a high resolution, whose patches are pooled."""
    side = crop // PATCH // 2

    def make(draw: Draw) -> tuple[Arrays, int]:
        patches = np.arange(2 * (2 * side) ** 2).reshape(2, side, 2, side, 2)
        pooling = patches.transpose(0, 1, 3, 2, 4).reshape(2 * side**2, 4)
        return {
            "pixel_values": draw.normal(size=(2, (2 * side) ** 2, patch)).astype(np.float32),
            "image_token_pooling": pooling,
            "image_grids": np.array([[side] * 4]),
            "image_num_crops": np.array([2]),
        }, 2 * side**2

    return Form(make, after=(END_ID, END_ID))


def plane(before: tuple[int, ...]) -> Form:
    """One image of any size, in pixels, with the sides of its grid of patches."""

    def make(draw: Draw) -> tuple[Arrays, int]:
        height, width = draw.integers(1, 4, 2).tolist()
        pixels = draw.normal(size=(1, PATCH * height, PATCH * width, 3)).astype(np.float32)
        grid = np.array([[height, width]], np.int32)
        return {"pixel_values": pixels, "image_grid_hw": grid}, height * width

    return Form(make, most=1, before=before)


def framed(patch: int) -> Form:
    """One image of any size, with a token more for each row, and for both of its ends."""

    def records(arrays: Arrays) -> Arrays:
        if not arrays:
            return {}
        is_image = np.array(arrays.pop("is_image"))
        height, width = (int(side) // MERGE for side in arrays["image_grid_thw"][0, 1:])
        positions = np.tile(np.arange(len(is_image)), (4, 1))
        inside = np.flatnonzero(is_image)[1:-1]
        positions[1, inside] = np.tile(np.arange(width + 1), height)
        positions[2, inside] = np.repeat(np.arange(height), width + 1)
        positions[3, inside] = 0
        return arrays | {"position_ids": mx.array(positions[None])}

    return grid(
        patch,
        by_row=1,
        by_image=2,
        most=1,
        derived=lambda tokens: {"is_image": np.array([token == IMAGE_ID for token in tokens])},
        records=records,
    )


def image_types(tokens: list[int]) -> Arrays:
    """Which tokens are an image's, as processors number the kinds of tokens."""
    return {"mm_token_type_ids": np.array([[int(token == IMAGE_ID) for token in tokens]])}
