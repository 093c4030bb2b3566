"""Random images as the processors of mlx-vlm's models would prepare them."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from support.vision.tiny_vision import END_ID, IMAGE_ID, START_ID

from chairlift.engine.messages import Array, PromptImage


class ImageMaker:
    """Makes random images as the processor of a model type would prepare them."""

    def __init__(self, model_type: str) -> None:
        self._kind = model_type

    def image(self, seed: int, height: int = 2, width: int = 2) -> tuple[list[int], PromptImage]:
        """The tokens that stand for an image, and the image at places that begin with 0.

        ``height`` and ``width`` are in merged patches, for models with images of any size.
        """
        random = np.random.default_rng(seed)
        arrays: dict[str, np.ndarray[Any, Any]]
        if self._kind.startswith("qwen"):
            grid = (1, 2 * height, 2 * width)
            patch = 3 * 2 * 4 * 4
            arrays = {
                "pixel_values": random.normal(size=(math.prod(grid), patch)).astype(np.float32),
                "image_grid_thw": np.array([grid], np.int64),
            }
            tokens = [START_ID, *[IMAGE_ID] * (height * width), END_ID]
        elif self._kind in ("idefics3", "smolvlm"):
            tiles = int(random.integers(1, 4))
            arrays = {
                "pixel_values": random.normal(size=(1, tiles, 3, 16, 16)).astype(np.float32),
                "pixel_attention_mask": np.ones((1, tiles, 16, 16), np.int64),
            }
            tokens = [END_ID, *([*[IMAGE_ID] * 4, END_ID] * tiles)]
        elif self._kind == "gemma3":
            arrays = {"pixel_values": random.normal(size=(1, 3, 16, 16)).astype(np.float32)}
            tokens = [START_ID, *[IMAGE_ID] * 4, END_ID]
        elif self._kind.startswith("internvl"):
            tiles = int(random.integers(1, 4))
            arrays = {"pixel_values": random.normal(size=(tiles, 3, 16, 16)).astype(np.float32)}
            tokens = [START_ID, *[IMAGE_ID] * 4 * tiles, END_ID]
        elif self._kind == "mistral3":
            arrays = {
                "pixel_values": random.normal(size=(1, 3, 16, 16)).astype(np.float32),
                "image_sizes": np.array([[16, 16]], np.int64),
            }
            tokens = [IMAGE_ID] * 2 + [START_ID] + [IMAGE_ID] * 2 + [END_ID]
        else:
            arrays = {"pixel_values": random.normal(size=(1, 3, 16, 16)).astype(np.float32)}
            tokens = [IMAGE_ID] * 16
        places = [place for place, token in enumerate(tokens) if token == IMAGE_ID]
        return tokens, PromptImage(
            _digest(arrays),
            places,
            {name: Array(str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()},
        )

    def prompt(
        self, seed: int, texts: list[int], repeat: int | None = None
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Random texts of these lengths with an image between each two of them.

        The images are those of ``repeat``, another prompt's seed, if that is given.
        """
        random = np.random.default_rng(seed)
        prompt: list[int] = []
        images: list[PromptImage] = []
        shapes = np.random.default_rng(seed if repeat is None else repeat)
        for number, length in enumerate(texts):
            if number:
                height, width = shapes.integers(1, 4, 2).tolist()
                tokens, image = self.image(int(shapes.integers(1 << 30)), height, width)
                places = [len(prompt) + place for place in image.places]
                images.append(PromptImage(image.digest, places, image.arrays))
                prompt += tokens
            prompt += random.integers(3, 250, length).tolist()
        return prompt, tuple(images)

    def sized_prompt(self, seed: int, image: int) -> tuple[list[int], tuple[PromptImage, ...]]:
        """A random text around an image of 2 x 2 patches; another ``image`` has the same tokens."""
        before, after = (np.random.default_rng(seed).integers(3, 250, 6).tolist() for _ in range(2))
        tokens, drawn = self.image(image)
        places = [len(before) + place for place in drawn.places]
        placed = PromptImage(drawn.digest, places, drawn.arrays)
        return [*before, *tokens, *after], (placed,)


def _digest(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).digest()
