"""The kernel of ``chunk_attention``, run on the CPU by the emulator."""

from __future__ import annotations

from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from emulator.sequences import SCALE, Chunk, Sequences, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.step import ChunkPlace
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged import chunk_attention, tiles
from chairlift.engine.cuda.paged.arrays import ChunkStep

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

SHAPES = [
    Shape(2, 1, 64, mx.bfloat16),
    Shape(1, 3, 64, mx.float16, window=70, sinks=True),
    Shape(2, 4, 128, mx.bfloat16, window=65),
    Shape(1, 12, 128, mx.float16, sinks=True),
    Shape(1, 8, 256, mx.bfloat16, sinks=True),
    Shape(1, 4, 192, mx.float16, window=9),
    Shape(1, 8, 80, mx.bfloat16, sinks=True),
    Shape(2, 3, 80, mx.float16, window=3),
    Shape(1, 16, 96, mx.bfloat16, window=64),
    Shape(1, 20, 64, mx.float16),
    Shape(2, 4, 128, mx.bfloat16, window=65, quantization=Quantization(8, 64)),
    Shape(1, 8, 64, mx.float16, sinks=True, quantization=Quantization(4, 32)),
    Shape(1, 3, 256, mx.bfloat16, quantization=Quantization(8, 128)),
    Shape(2, 2, 96, mx.float16, window=9, quantization=Quantization(8, 32)),
]
# At and around the ends of pages and tiles, with a chunk of one token.
CHUNKS = [Chunk(130, 7), Chunk(0, 70), Chunk(63, 2), Chunk(64, 1), Chunk(60, 18), Chunk(62, 3)]


def attend(inputs: Sequences, backwards: bool, min_columns: int = tiles.MIN_COLUMNS) -> mx.array:
    """The kernel's result; ``min_columns`` are the least columns of a split."""
    firsts = accumulate((chunk.new for chunk in inputs.chunks), initial=0)
    places = [
        ChunkPlace(first, *chunk, row)
        for row, (first, chunk) in enumerate(zip(firsts, inputs.chunks, strict=False))
    ]
    shape = inputs.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MIN_COLUMNS", min_columns)
        step = ChunkStep(
            inputs.tables,
            *tiles.chunk_tiles(places, shape.key_heads, shape.group, shape.dim, shape.window),
        )
    with emulated(chunk_attention, backwards):
        return chunk_attention.chunk_attention(
            inputs.queries,
            inputs.new,
            inputs.pool,
            step,
            SCALE,
            inputs.shape.window,
            inputs.sinks,
            quantization=inputs.shape.quantization,
        )


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_attend_to_what_they_see(shape: Shape, backwards: bool) -> None:
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards))
    split = Sequences(shape, CHUNKS)
    split.check(attend(split, backwards, min_columns=64))


@pytest.mark.slow
@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=3
    ),
    window=st.none() | st.integers(1, 150),
    backwards=st.booleans(),
    min_columns=st.sampled_from([64, 128, 512]),
)
@settings(max_examples=30)
def test_any_chunks(
    chunks: list[Chunk], window: int | None, backwards: bool, min_columns: int
) -> None:
    inputs = Sequences(Shape(1, 5, 64, mx.float16, window), chunks)
    inputs.check(attend(inputs, backwards, min_columns))


@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 100_000), st.integers(1, 3000)), min_size=1, max_size=5
    ),
    key_heads=st.integers(1, 16),
    group=st.integers(1, 32),
    dim=st.sampled_from([64, 128, 256]),
    window=st.none() | st.integers(1, 8192),
)
def test_tiles_cover_each_chunk_and_no_split_is_empty(
    chunks: list[Chunk], key_heads: int, group: int, dim: int, window: int | None
) -> None:
    places = [ChunkPlace(1000 * row, *chunk, row) for row, chunk in enumerate(chunks)]
    array, slots = tiles.chunk_tiles(places, key_heads, group, dim, window)
    size, columns = chunk_attention.tile_tokens(group), chunk_attention.block_columns(dim)
    splits: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for token, position, count, row, first, split, of, slot in np.array(array).tolist():
        assert (token, position, count, row) == places[row]
        splits.setdefault((row, first), []).append((split, of, slot))
    assert set(splits) == {
        (row, first) for row, chunk in enumerate(chunks) for first in range(0, chunk.new, size)
    }
    taken: list[int] = []
    for (row, first), parts in splits.items():
        counts, slot = {of for _, of, _ in parts}, parts[0][2]
        assert counts == {len(parts)}
        assert sorted(parts) == [(split, len(parts), slot) for split in range(len(parts))]
        place = places[row]
        stop = min(place.position + first + size, place.position + place.tokens)
        oldest = max(0, place.position + first + 1 - window) if window else 0
        assert len(parts) == 1 or len(parts) <= -(-stop // columns) - oldest // columns
        taken += range(slot, slot + len(parts)) if len(parts) > 1 else ()
    assert sorted(taken) == list(range(slots))


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_attend_to_many_old_tokens(window: int | None) -> None:
    inputs = Sequences(Shape(1, 4, 128, mx.bfloat16, window), [Chunk(330, 20), Chunk(256, 3)])
    inputs.check(attend(inputs, backwards=True))
