"""Rotary embedding of few numbers of a head: the launch on CUDA, and the results."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.cuda import narrow_rope

# MLX's own function; tests of simulated CUDA devices may have replaced ``mx.fast.rope``.
ORIGINAL = narrow_rope._rope
# CUDA's limits of a block's three dimensions.
LIMITS = (1024, 1024, 64)


def block_of(*sizes: int) -> list[int]:
    """MLX's block: all dimensions double in turn, up to these sizes and to 1,024 threads in all."""
    block = [1, 1, 1]
    growing = True
    while growing:
        growing = False
        for place, size in enumerate(sizes):
            if 2 * block[place] <= size and block[0] * block[1] * block[2] < 1024:
                block[place] *= 2
                growing = True
    return block


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that MLX's own function was called with."""
    shapes: list[tuple[int, ...]] = []

    def recorded(x: mx.array, dims: int, **settings: Any) -> mx.array:
        shapes.append(x.shape)
        return ORIGINAL(x, dims, **settings)

    monkeypatch.setattr(narrow_rope, "_rope", recorded)
    return shapes


@given(
    sequences=st.sampled_from([1, 2, 3, 15, 16, 17, 64, 127, 128, 129, 1280]),
    heads=st.sampled_from([1, 2, 4, 5, 8, 32, 64, 512]),
    length=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 300]),
    pairs=st.integers(1, 64),
)
def test_every_launch_is_valid(sequences: int, heads: int, length: int, pairs: int) -> None:
    positions = narrow_rope._positions((sequences, heads, length, 2 * pairs), 2 * pairs)
    block = block_of(pairs, positions, sequences * -(-heads // 4))
    assert all(size <= limit for size, limit in zip(block, LIMITS, strict=True))
    assert positions >= length


def test_the_launch_is_invalid_without() -> None:
    # StableLM-3B: 20 of 80 numbers, 32 heads, 16 tokens.
    assert block_of(10, 1, 16 * 8)[2] > LIMITS[2]


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [2, 6, 16, 20, 32])
@pytest.mark.parametrize(
    "shape", [(130, 1, 1, 40), (3, 200, 1, 40), (80, 8, 3, 40), (300, 1, 40), (2, 4, 64, 1, 40)]
)
def test_results_are_those_of_mlx(
    shape: tuple[int, ...], dims: int, traditional: bool, launched: list[tuple[int, ...]]
) -> None:
    x = mx.random.normal(shape)
    offsets = mx.arange(shape[0]) * 7
    settings: dict[str, Any] = {"traditional": traditional, "scale": 0.5, "offset": offsets}
    frequencies = 10_000 ** (mx.arange(dims // 2) / dims)
    for more in ({"base": 1e4, "freqs": None}, {"base": None, "freqs": frequencies}):
        result = narrow_rope.rope(x, dims, **settings, **more)
        assert mx.array_equal(result, ORIGINAL(x, dims, **settings, **more)).item()
    lengths = {shape[-2] for shape in launched}
    assert lengths == {max(shape[-2], 16 // 2 ** ((dims // 2).bit_length() - 1))}


def test_other_calls_are_unchanged(launched: list[tuple[int, ...]]) -> None:
    for shape, dims in (((1, 4, 300, 8), 8), ((7, 8, 1, 16), 16), ((500, 32, 1, 64), 64)):
        narrow_rope.rope(mx.ones(shape), dims, traditional=False, base=1e4, scale=1.0, offset=3)
        assert launched.pop() == shape


def test_rotary_modules_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "rope", mx.fast.rope)
    narrow_rope.install()
    called = []
    monkeypatch.setattr(narrow_rope, "_rope", lambda x, dims, **_: called.append(dims) or x)
    nn.RoPE(16)(mx.ones((200, 4, 1, 64)))
    assert called == [16]
