"""The kernel of ``chunk_attention``, run on the CPU by the emulator."""

from __future__ import annotations

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated
from emulator.sequences import SCALE, Chunk, Sequences, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.cuda.paged import chunk_attention
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
]
# At and around the ends of pages and tiles, with a chunk of one token.
CHUNKS = [Chunk(130, 7), Chunk(0, 70), Chunk(63, 2), Chunk(64, 1), Chunk(60, 18), Chunk(62, 3)]


def attend(inputs: Sequences, backwards: bool) -> mx.array:
    tiles, packed = [], 0
    for row, chunk in enumerate(inputs.chunks):
        firsts = range(0, chunk.new, chunk_attention.tile_tokens(inputs.shape.group))
        tiles += [(packed, chunk.old, chunk.new, row, first) for first in firsts]
        packed += chunk.new
    with emulated(chunk_attention, backwards):
        return chunk_attention.chunk_attention(
            inputs.queries,
            inputs.new,
            inputs.pool,
            ChunkStep(inputs.tables, mx.array(tiles, mx.int32)),
            SCALE,
            inputs.shape.window,
            inputs.sinks,
        )


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_attend_to_what_they_see(shape: Shape, backwards: bool) -> None:
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards))


@pytest.mark.slow
@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=3
    ),
    window=st.none() | st.integers(1, 150),
    backwards=st.booleans(),
)
@settings(max_examples=30)
def test_any_chunks(chunks: list[Chunk], window: int | None, backwards: bool) -> None:
    inputs = Sequences(Shape(1, 5, 64, mx.float16, window), chunks)
    inputs.check(attend(inputs, backwards))


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_attend_to_many_old_tokens(window: int | None) -> None:
    inputs = Sequences(Shape(1, 4, 128, mx.bfloat16, window), [Chunk(330, 20), Chunk(256, 3)])
    inputs.check(attend(inputs, backwards=True))
