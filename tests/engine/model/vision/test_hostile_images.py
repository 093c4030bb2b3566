"""Images with any numbers in their messages: they are served or refused, and the engine goes on."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.bench import Bench
from support.tiny import tiny_model
from support.vision.image_maker import ImageMaker
from support.vision.tiny_vision import numpy_of, vision_model

from chairlift.engine.messages import Array, PromptImage
from chairlift.engine.model import attention

_MODEL = vision_model("qwen2_vl")
attention.install(_MODEL)
_NUMBERS = st.one_of(st.integers(-3, 60), st.integers(-(2**62), 2**62))


def _damaged(image: PromptImage, drawn: random.Random, numbers: list[int]) -> PromptImage:
    grid = numpy_of(image.arrays["image_grid_thw"]).copy()
    pixels = image.arrays["pixel_values"]
    choice = drawn.randrange(9)
    changes: list[dict[str, Any]] = [
        {"places": numbers},
        {"places": sorted(set(numbers))},
        {"places": image.places[:-1]},
        {"places": image.places[::-1]},
        {"digest": image.digest[:5]},
        {"arrays": {}},
        {"arrays": image.arrays | {"pixel_values": Array("float32", (-1, 96), pixels.data)}},
        {"arrays": image.arrays | {"pixel_values": Array("object", pixels.shape, pixels.data)}},
        {"arrays": image.arrays | {"image_grid_thw": _resized(grid, numbers)}},
    ]
    return msgspec.structs.replace(image, **changes[choice])


def _resized(grid: np.ndarray[Any, Any], numbers: list[int]) -> Array:
    for place, number in enumerate(numbers[:3]):
        grid[0, place] = number
    return Array("int64", grid.shape, grid.tobytes())


@cache
def _bench() -> Bench:
    """The engine that gets the images of all examples: building one takes longer than serving."""
    return Bench(_MODEL)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.lists(_NUMBERS, max_size=6))
def test_an_engine_survives_any_image(seed: int, numbers: list[int]) -> None:
    drawn = random.Random(seed)
    if not _bench().core.idle:  # an example has failed
        _bench.cache_clear()
    bench = _bench()
    bench.outputs.clear()
    prompt, images = ImageMaker("qwen2_vl").prompt(3, [3, 4, 5])
    bench.submit("good", prompt, 4, reading={"images": images})
    damaged = tuple(_damaged(image, drawn, numbers) for image in images)
    bench.submit("bad", prompt, 4, reading={"images": damaged})
    bench.drain()
    assert len(bench.tokens("good")) == 4
    assert bench.outputs["bad", 0][-1].finish in ("error", "length")
    assert not len(bench.core.images)


def test_a_model_that_does_not_see_refuses_images() -> None:
    bench = Bench(tiny_model("llama"))
    prompt, images = ImageMaker("llava").prompt(3, [3, 4])
    bench.submit("0", [token % 250 for token in prompt], 4, reading={"images": images})
    bench.submit("1", [5, 6], 4)
    bench.drain()
    assert bench.outputs["0", 0][-1].finish == "error"
    assert len(bench.tokens("1")) == 4
