"""The kernel of ``chunk_attention``, run on the CPU by the emulator."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated
from emulator.sequences import SCALE, Chunk, Sequences, Shape, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.step import ChunkPlace, step_numbers
from chairlift.cache.pages.upload import HostBuffers, uploaded
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged import chunk_attention, tiles, token_attention
from chairlift.engine.cuda.paged.arrays import ChunkStep
from chairlift.engine.cuda.paged.kernels import CudaPages

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
    Shape(2, 3, 32, mx.bfloat16, window=9, sinks=True),
    Shape(1, 6, 48, mx.float16),
    Shape(1, 4, 112, mx.bfloat16, window=65),
    Shape(1, 2, 160, mx.float16, sinks=True),
    Shape(1, 8, 224, mx.bfloat16),
    Shape(1, 4, 144, mx.bfloat16, window=9),
    Shape(2, 2, 128, mx.bfloat16, window=65, softcap=1.5),
    Shape(1, 5, 64, mx.float16, sinks=True, softcap=2.5),
    Shape(2, 2, 192, mx.bfloat16, value_dim=128),
    Shape(1, 6, 96, mx.float16, window=65, sinks=True, value_dim=64),
    Shape(1, 3, 256, mx.bfloat16, value_dim=16),
    Shape(1, 5, 64, mx.float16, value_dim=48),
    Shape(1, 3, 16, mx.bfloat16, window=70),
    Shape(2, 4, 128, mx.bfloat16, window=65, quantization=Quantization(8, 64)),
    Shape(1, 8, 64, mx.float16, sinks=True, quantization=Quantization(4, 32)),
    Shape(1, 3, 256, mx.bfloat16, quantization=Quantization(8, 128)),
    Shape(2, 2, 96, mx.float16, window=9, quantization=Quantization(8, 32)),
]
# At and around the ends of pages and tiles, with a chunk of one token.
CHUNKS = [Chunk(130, 7), Chunk(0, 70), Chunk(63, 2), Chunk(64, 1), Chunk(60, 18), Chunk(62, 3)]


HEIGHTS = st.sampled_from([chunk_attention.SHORT, chunk_attention.TALL])


def form_of(shape: Shape) -> tiles.Form:
    return tiles.Form(shape.key_heads, shape.group, shape.dim, shape.window)


def attend(
    inputs: Sequences,
    backwards: bool,
    min_columns: int = tiles.MIN_COLUMNS,
    tile: int = chunk_attention.SHORT,
    ample: bool = True,
) -> mx.array:
    """The kernel's result.

    Args:
        min_columns: the least columns of a split.
        tile: the rows of a tile; tall ones are short, if heads are too long for them.
        ample: whether the GPU has much shared memory.
    """
    if inputs.shape.dim > chunk_attention.LONG_DIM:
        tile = chunk_attention.SHORT
    firsts = accumulate((chunk.new for chunk in inputs.chunks), initial=0)
    places = [
        ChunkPlace(first, *chunk, row)
        for row, (first, chunk) in enumerate(zip(firsts, inputs.chunks, strict=False))
    ]
    lengths = mx.zeros((len(inputs.queries),), mx.int32)
    with pytest.MonkeyPatch.context() as patch, emulated(chunk_attention, backwards):
        patch.setattr(tiles, "MIN_COLUMNS", min_columns)
        patch.setattr(chunk_attention, "ample_shared", lambda: ample)
        array, slots = tiles.chunk_tiles(places, 0, tiles.Tiling(form_of(inputs.shape), tile))
        step = ChunkStep(inputs.pages, mx.array(array), tile, slots, lengths, inputs.queries)
        return chunk_attention.chunk_attention(
            inputs.queries,
            inputs.new,
            inputs.pool,
            step,
            SCALE,
            inputs.shape.window,
            inputs.sinks,
            quantization=inputs.shape.quantization,
            softcap=inputs.shape.softcap,
        )


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_attend_to_what_they_see(shape: Shape, backwards: bool) -> None:
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards, tile=chunk_attention.TALL))
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards, min_columns=64, ample=False))
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards, min_columns=64, tile=chunk_attention.TALL))


@pytest.mark.slow
@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=3
    ),
    window=st.none() | st.integers(1, 150),
    backwards=st.booleans(),
    min_columns=st.sampled_from([64, 128, 512]),
    tile=HEIGHTS,
)
@settings(max_examples=30)
def test_any_chunks(
    chunks: list[Chunk], window: int | None, backwards: bool, min_columns: int, tile: int
) -> None:
    inputs = Sequences(Shape(1, 5, 64, mx.float16, window), chunks)
    inputs.check(attend(inputs, backwards, min_columns, tile))


@pytest.mark.slow
@given(
    shape=shapes(mx.float16, mx.bfloat16),
    backwards=st.booleans(),
    tile=HEIGHTS,
    ample=st.booleans(),
)
@settings(max_examples=8)
def test_any_dimensions(shape: Shape, backwards: bool, tile: int, ample: bool) -> None:
    inputs = Sequences(shape, CHUNKS[:3])
    inputs.check(attend(inputs, backwards, tile=tile, ample=ample))


@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 100_000), st.integers(1, 3000)), min_size=1, max_size=5
    ),
    key_heads=st.integers(1, 16),
    group=st.integers(1, 32),
    dim=st.sampled_from([64, 128, 256]),
    window=st.none() | st.integers(1, 8192),
    rows=st.integers(0, 300),
    tile=HEIGHTS,
)
def test_tiles_cover_each_chunk_and_no_split_is_empty(
    chunks: list[Chunk],
    key_heads: int,
    group: int,
    dim: int,
    window: int | None,
    rows: int,
    tile: int,
) -> None:
    places = [ChunkPlace(1000 * row, *chunk, row) for row, chunk in enumerate(chunks)]
    tiling = tiles.Tiling(tiles.Form(key_heads, group, dim, window), tile)
    array, slots = tiles.chunk_tiles(places, rows, tiling)
    size, columns = tiling.tokens, chunk_attention.block_columns(dim)
    splits: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    copied: list[int] = []
    for token, position, count, row, first, split, of, slot in array.tolist():
        if not of:
            copied += range(token, token + count)
            continue
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
    assert copied == list(range(rows))
    tokens = rows + sum(chunk.new for chunk in chunks)
    most = tiles.tile_limits(tokens, rows, len(chunks) + 1, tiling)
    assert len(array) <= most.tiles
    assert slots <= most.slots


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_attend_to_many_old_tokens(window: int | None) -> None:
    for tile in (chunk_attention.SHORT, chunk_attention.TALL):
        inputs = Sequences(Shape(1, 4, 128, mx.bfloat16, window), [Chunk(330, 20), Chunk(256, 3)])
        inputs.check(attend(inputs, backwards=True, tile=tile))


class Step(NamedTuple):
    """A step of rows, of which some have drafts, and chunks of prompts."""

    rows: list[Chunk]
    chunks: list[Chunk]
    tail: int = 0
    row_limit: int = 0


STEPS = [
    Step([], [Chunk(0, 5)], tail=3),
    Step([Chunk(3, 1)], [Chunk(70, 20)], row_limit=16),
    Step([Chunk(old, 1) for old in (0, 130, 64, 63)], [Chunk(0, 9), Chunk(200, 30)], 5, 48),
    Step([Chunk(old, 1) for old in range(40)], [Chunk(0, 1)], tail=7, row_limit=40),
    Step([Chunk(9, 1), Chunk(63, 4), Chunk(0, 1), Chunk(130, 2), Chunk(61, 1)], [], 3, 16),
    Step([Chunk(9, 3), Chunk(5, 1), Chunk(70, 5)], [Chunk(0, 20)], 3, 9),
    Step([Chunk(9, 3), Chunk(5, 1)], [Chunk(9, 120), Chunk(0, 7)], 2, 4),
]


def step_of(step: Step, shape: Shape, seed: int = 0) -> tuple[Sequences, mx.array, KeysValues]:
    """The inputs, and the queries, keys and values with unused tokens of NaN behind them."""
    inputs = Sequences(shape, [*step.rows, *step.chunks], seed)
    unused = ((0, step.tail), *[(0, 0)] * 3)
    queries, *new = (
        mx.pad(array, unused, constant_values=float("nan"))
        for array in (inputs.queries, *inputs.new)
    )
    return inputs, queries, KeysValues(*new)


def check_step(step: Step, shape: Shape, backwards: bool, ample: bool = True) -> None:
    """Asserts that ``CudaPages.attend`` is right, and that its launches have the limits' sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "ample_shared", lambda: ample)
        _check_step(step, shape, backwards)


def _check_step(step: Step, shape: Shape, backwards: bool) -> None:
    inputs, queries, new = step_of(step, shape)
    numbers = step_numbers(
        step.rows,
        step.chunks,
        {shape.window: inputs.lists},
        step.tail,
        step.row_limit,
    )
    (kind,) = numbers.on_device(uploaded(numbers.parts, HostBuffers())).kinds.values()
    with emulated(chunk_attention, backwards), emulated(token_attention, backwards):
        scoring = Scoring(SCALE, shape.window, inputs.sinks, shape.softcap)
        result = CudaPages().attend(queries, new, inputs.pool, kind, scoring, None)
    assert result.shape == (*queries.shape[:3], shape.dims[1])
    inputs.check(result[: len(inputs.queries)])
    if kind.tokens.chunks and shape.dtype != mx.float32:
        sizes = kind.tokens.sizes
        assert sizes.tokens == len(queries)
        tile = kind.tokens.tiles[form_of(shape)]
        tiling = tiles.tiling_of(form_of(shape), sizes)
        limits = (len(queries), sizes.row_limit, sizes.chunk_limit, tiling)
        assert (len(tile.array), tile.slots) == tiles.tile_limits(*limits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_rows_and_chunks_attend_in_one_step(step: Step, dtype: mx.Dtype) -> None:
    check_step(step, Shape(2, 2, 64, dtype, window=70), backwards=True)
    check_step(step, Shape(1, 5, 64, dtype, sinks=True), backwards=False)
    check_step(step, Shape(1, 3, 96, dtype, softcap=1.5, value_dim=64), backwards=True)
    check_step(step, Shape(1, 4, 96, dtype), backwards=False, ample=False)


@pytest.mark.slow
@given(
    rows=st.lists(
        st.builds(Chunk, st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 5])), max_size=20
    ),
    chunks=st.lists(st.builds(Chunk, st.integers(0, 150), st.integers(1, 40)), max_size=3),
    tail=st.integers(0, 20),
    more=st.integers(0, 30),
    window=st.none() | st.integers(1, 150),
)
@settings(max_examples=25)
def test_any_rows_and_chunks(
    rows: list[Chunk], chunks: list[Chunk], tail: int, more: int, window: int | None
) -> None:
    if not rows:
        chunks = [*chunks, Chunk(0, 3)]
    tokens = sum(chunk.new for chunk in [*rows, *chunks]) + tail
    limit = min(sum(row.new for row in rows) + more, tokens)
    step = Step(rows, chunks, tail, limit)
    check_step(step, Shape(1, 4, 64, mx.float16, window), backwards=bool(more % 2))
