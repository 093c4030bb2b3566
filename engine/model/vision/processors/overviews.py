"""Adds the overview, one more tile, to Llama 4's images in several tiles."""

from __future__ import annotations

from typing import Any


def add_overviews(processor: Any) -> None:
    """Gives an image in several tiles the whole image as the last one.

    NOTE: mlx-vlm 0.7.10 makes the tokens of this tile, but not its pixels. Its model then reads
    behind the end of the other tiles' embeddings.
    """
    from PIL import Image  # text models are served without the extra "vision"

    tiler = processor.image_processor
    tiles_of = tiler._split_into_tiles

    def tiles_and_overview(image: Any, ratio: tuple[int, int]) -> list[Any]:
        tiles: list[Any] = tiles_of(image, ratio)
        return tiles if len(tiles) == 1 else [*tiles, *tiles_of(image, (1, 1))]

    two_tiles = Image.new("RGB", (2 * tiler.size, tiler.size))
    if len(tiler.preprocess([two_tiles])["pixel_values"]) == 2:
        tiler._split_into_tiles = tiles_and_overview
