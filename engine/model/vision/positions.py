"""The positions of tokens for models whose positions are not their places in the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.messages import PromptImage
from chairlift.engine.model.vision.families import Family
from chairlift.engine.model.vision.image_arrays import numpy_of
from chairlift.engine.model.vision.token_inputs import Positions, TokenInputs, shifts_of


class TokenPositions:
    """Computes the positions of a prompt's tokens, and those of a step.

    Args:
        model: mlx-vlm's model.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self._model = model
        self._language_model = model.language_model
        self._config = getattr(model.config, "thinker_config", model.config)
        self._family = family
        self._axes = _axes(model.language_model, family)

    def shifts(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Positions | None:
        """The positions of a prompt's tokens minus their places, ``[axes, tokens]``.

        None if images do not change them.

        Raises:
            ValueError: an image has another number of places than its grid.
        """
        if self._family.positions == "equal":
            return None
        if self._family.positions == "prompt":
            # mlx-vlm computes a prompt's last token like those that are generated.
            return np.full((1, len(prompt)), len(prompt) - 1, np.int32)
        match self._family.positions:
            case "canvas":
                positions = self._on_canvas(prompt, images)
            case "xdrope":
                positions = self._xdrope(prompt, images)
            case "block":
                positions = self._by_block(prompt, images)
            case _:
                grids = mx.array(self._grids(images))
                tokens = mx.array([self._marks(prompt, images)], mx.int32)
                positions, _ = self._language_model.get_rope_index(tokens, grids)
                positions = mx.moveaxis(positions, self._family.axis, 0)
        by_axis = np.asarray(positions)
        # A text's positions may be the same for all axes.
        by_axis = by_axis[:, 0] if by_axis.ndim == 3 else by_axis
        shifts = np.broadcast_to(by_axis, (self._axes, len(prompt))) - np.arange(len(prompt))
        return shifts.astype(np.int32)

    def of_step(self, shape: Sequence[int], cache: Any, given: Sequence[TokenInputs]) -> mx.array:
        """The positions of a step's tokens, ``[axes, rows, step]`` or as the model has them.

        With "prompt", the ends of their prompts instead, ``[rows, step]``.
        """
        rows, step = shape
        if self._family.positions == "prompt":
            ends = shifts_of(given, 1) if given else np.zeros(rows * step, np.int32)
            return mx.array(ends.reshape(rows, step))
        offset = mx.array(_offset(cache)).reshape(-1, 1)
        places = mx.broadcast_to(offset + mx.arange(step), (rows, step))
        if all(each.is_plain for each in given):
            positions = mx.broadcast_to(places, (self._axes, rows, step))
        else:
            shifts = shifts_of(given, self._axes).reshape(self._axes, rows, step)
            positions = places + mx.array(shifts)
        return positions[0] if self._axes == 1 else mx.moveaxis(positions, 0, self._family.axis)

    def _marks(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
        """A prompt with -1 in place of all tokens except those by which mlx-vlm finds images.

        A text may contain tokens of images and videos, too. They are tokens of the text.
        """
        begin = getattr(self._config, "vision_start_token_id", None)
        marks = [-1] * len(prompt)
        for image in images:
            before = image.places[0] - 1
            if before >= 0 and prompt[before] == begin:
                marks[before] = prompt[before]
            for place in image.places:
                marks[place] = prompt[place]
        return marks

    def _grids(self, images: Sequence[PromptImage]) -> Any:
        """The images' patches in time, height and width, ``[images, 3]``."""
        return np.concatenate([self._grid(image) for image in images])

    def _grid(self, image: PromptImage, by_row: int = 0, by_image: int = 0) -> np.ndarray[Any, Any]:
        """An image's patches in time, height and width, ``[1, 3]``.

        Args:
            by_row: further tokens of each row of patches.
            by_image: further tokens of the image.
        """
        if "image_grid_thw" not in image.arrays:
            raise ValueError("an image has no grid of patches")
        grid = numpy_of(image.arrays["image_grid_thw"])
        merge = self._config.vision_config.spatial_merge_size
        # Python's numbers: these may be of any size.
        sides = [int(side) for side in grid.flat]
        if grid.shape != (1, 3) or min(sides) < 1:
            raise ValueError("an image has no grid of patches")
        tokens = sides[0] * (sides[1] // merge) * (sides[2] // merge + by_row) + by_image
        if tokens != len(image.places):
            raise ValueError("an image has another number of places than its grid")
        return grid

    def _xdrope(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Any:
        """The positions of HunyuanVL's processor: place, column, row, and a fourth number.

        The first and the last token of an image have their places only.
        """
        positions = np.tile(np.arange(len(prompt)), (self._axes, 1))
        for image in images:
            grid = self._grid(image, by_row=1, by_image=2)
            width = int(grid[0, 2]) // self._config.vision_config.spatial_merge_size + 1
            inside = slice(image.places[0] + 1, image.places[-1])
            number = np.arange(len(image.places) - 2)
            positions[1, inside], positions[2, inside] = number % width, number // width
            positions[3:, inside] = 0
        return positions

    def _by_block(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> mx.array:
        for image in images:
            grid = image.arrays.get("image_grid_hw")
            sides = [] if grid is None else [int(side) for side in numpy_of(grid).flat]
            if len(sides) != 2 or min(sides) < 1 or math.prod(sides) != len(image.places):
                raise ValueError("an image has another number of places than its grid")
        positions: mx.array
        positions, *_ = self._language_model.get_rope_index(mx.array([list(prompt)], mx.int32))
        return positions[None]

    def _on_canvas(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Any:
        from mlx_vlm.models.minicpmv4_7.rope import CanvasRoPE

        is_image = np.zeros((1, len(prompt)), np.int64)
        sizes = []
        for image in images:
            is_image[0, image.places] = 1
            sizes.append(numpy_of(image.arrays["tgt_sizes"]).reshape(-1, 2))
        factor = 2 if self._config.downsample_mode == "4x" else 4
        grids = np.concatenate(sizes)
        tokens = sum(int(height) // factor * (int(width) // factor) for height, width in grids)
        if grids.min() < 1 or tokens != is_image.sum():
            raise ValueError("an image has another number of places than its grid")
        positions, _ = CanvasRoPE(self._config).get_rope_index(
            np.array([list(prompt)]),
            mm_token_type_ids=is_image,
            target_sizes=grids,
            target_sizes_videos=np.empty((0,)),
        )
        return positions


def _axes(language_model: Any, family: Family) -> int:
    """The numbers that make the position of a token."""
    if family.positions == "xdrope":
        return len(language_model.args.rope_scaling["xdrope_section"])
    if family.positions == "block":
        return 1
    # Some types have M-RoPE in some models only.
    rotary = getattr(language_model.model, "rotary_emb", None)
    return 1 if getattr(rotary, "position_selector", True) is None else 3


def _offset(caches: Sequence[Any]) -> Any:
    """The positions of a step's first tokens, by the first layer that counts them."""
    return next(cache.offset for cache in caches if hasattr(cache, "offset"))
