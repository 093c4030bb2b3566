"""The kernels of ``token_attention``, run on the CPU by the emulator."""

from __future__ import annotations

import math
from contextlib import nullcontext

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated
from emulator.sequences import SCALE, Chunk, Sequences, Shape, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.step import step_numbers
from chairlift.cache.pages.upload import HostBuffers, uploaded
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged import token_attention
from chairlift.engine.cuda.paged.arrays import TokenStep
from chairlift.engine.cuda.paged.kernels import CudaPages, check
from chairlift.engine.device.profile import CUDA

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
    Shape(1, 5, 96, mx.bfloat16),
    Shape(2, 3, 32, mx.bfloat16, window=9, sinks=True),
    Shape(1, 6, 48, mx.float16),
    Shape(1, 4, 112, mx.bfloat16, window=65),
    Shape(1, 2, 160, mx.float16, sinks=True),
    Shape(1, 8, 224, mx.bfloat16),
    Shape(1, 4, 144, mx.bfloat16, window=9),
    Shape(2, 2, 128, mx.bfloat16, window=65, softcap=1.5),
    Shape(1, 5, 64, mx.float16, sinks=True, softcap=2.5),
    Shape(1, 2, 80, mx.float32, softcap=0.5),
    Shape(2, 2, 192, mx.bfloat16, value_dim=128),
    Shape(1, 6, 96, mx.float16, window=65, sinks=True, value_dim=64),
    Shape(1, 3, 256, mx.bfloat16, value_dim=16),
    Shape(1, 5, 64, mx.float16, value_dim=48),
    Shape(1, 3, 192, mx.float32, window=70, value_dim=128),
    Shape(1, 3, 16, mx.float32, window=70),
    Shape(2, 4, 128, mx.float32, window=20, sinks=True),
    Shape(1, 1, 80, mx.float32),
    Shape(1, 7, 256, mx.float32, window=64),
    Shape(2, 4, 128, mx.bfloat16, window=65, quantization=Quantization(8, 64)),
    Shape(1, 8, 64, mx.float16, sinks=True, quantization=Quantization(4, 32)),
    Shape(1, 3, 256, mx.bfloat16, quantization=Quantization(8, 128)),
    Shape(2, 2, 96, mx.float16, window=9, quantization=Quantization(8, 32)),
    Shape(1, 4, 128, mx.float32, sinks=True, quantization=Quantization(8, 64)),
    Shape(1, 1, 64, mx.float32, window=70, quantization=Quantization(4, 32)),
]
# Decode rows and prompt tokens, at and around the ends of pages.
CHUNKS = [Chunk(130, 1), Chunk(0, 5), Chunk(63, 2), Chunk(64, 1), Chunk(0, 1), Chunk(60, 9)]


def attend(inputs: Sequences, backwards: bool, limit: int | None = None) -> mx.array:
    """The kernel's result; ``limit`` is the bound of most columns, by default of all."""
    positions = inputs.positions()
    arrays = [
        mx.array(numbers, mx.int32)
        for numbers in zip(
            *((row, chunk.old, inputs.seen(at), at + 1) for row, chunk, at in positions),
            strict=True,
        )
    ]
    with emulated(token_attention, backwards):
        return token_attention.token_attention(
            inputs.queries,
            inputs.new,
            inputs.pool,
            TokenStep(inputs.pages, *arrays),
            max(map(sum, inputs.chunks)) if limit is None else limit,
            SCALE,
            inputs.sinks,
            quantization=inputs.shape.quantization,
            softcap=inputs.shape.softcap,
        )


def span_of(patch: pytest.MonkeyPatch, columns: int) -> None:
    """Lets each block have this many columns at most."""
    patch.setattr(token_attention, "SPANS", ())
    patch.setattr(token_attention, "MAX_SPAN", columns)


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_attend_to_what_they_see(
    shape: Shape, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    span_of(monkeypatch, 1 << 20)  # no splits
    inputs = Sequences(shape, CHUNKS)
    inputs.check(attend(inputs, backwards))


@pytest.mark.slow
@given(
    chunks=st.lists(
        st.builds(Chunk, st.integers(0, 150), st.integers(1, 4)), min_size=1, max_size=4
    ),
    window=st.none() | st.integers(1, 150),
    limit=st.none() | st.sampled_from([1, 80, 1000]),
    backwards=st.booleans(),
)
@settings(max_examples=30)
def test_any_tokens(
    chunks: list[Chunk], window: int | None, limit: int | None, backwards: bool
) -> None:
    inputs = Sequences(Shape(1, 5, 64, mx.float16, window), chunks)
    with pytest.MonkeyPatch.context() as patch:
        span_of(patch, 64)
        inputs.check(attend(inputs, backwards, limit))


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES[3:10:2], ids=str)
def test_splits_are_merged(shape: Shape, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    span_of(monkeypatch, 64)
    inputs = Sequences(shape, [Chunk(200, 1), Chunk(0, 3)])
    inputs.check(attend(inputs, backwards))


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("name", "most"), [("MAX_PARTIAL_BYTES", 40_000), ("MAX_SPLITS", 3)])
def test_fewer_blocks_take_more_columns_each(
    name: str, most: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    span_of(monkeypatch, 64)
    monkeypatch.setattr(token_attention, name, most)
    inputs = Sequences(Shape(2, 4, 64, mx.bfloat16, sinks=True), [Chunk(700, 1), Chunk(0, 3)])
    inputs.check(attend(inputs, backwards))


@given(
    tokens=st.integers(1, 70_000),
    heads=st.integers(1, 128),
    dim=st.integers(1, 16).map(lambda each: 16 * each),
    limit=st.integers(1, 1 << 25),
)
def test_results_of_blocks_fit_in_the_memory_of_a_step(
    tokens: int, heads: int, dim: int, limit: int
) -> None:
    span = token_attention.span_of(tokens * heads, token_attention.SPANS)
    splits = token_attention.splits_of(limit, span, tokens * heads * dim)
    assert splits == 1 or 4 * tokens * heads * dim * splits <= CUDA.attention_bytes // 2
    assert splits * (limit // 16 + 2) < 2**31, "the kernel's product of both"


@pytest.mark.slow
@given(shape=shapes(mx.float32, mx.float16, mx.bfloat16), backwards=st.booleans())
@settings(max_examples=8, deadline=None)
def test_any_dimensions(shape: Shape, backwards: bool) -> None:
    inputs = Sequences(shape, CHUNKS[:3])
    inputs.check(attend(inputs, backwards))


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype", "quantization", "message"),
    [
        (128, 128, mx.bfloat16, None, None),
        (112, 112, mx.float32, None, None),
        (192, 128, mx.float16, None, None),
        (128, 128, mx.bfloat16, Quantization(8, 64), None),
        (96, 96, mx.float32, Quantization(4, 32), None),
        (72, 72, mx.bfloat16, None, "heads of 72 and 72"),
        (272, 128, mx.bfloat16, None, "heads of 272 and 128"),
        (128, 0, mx.bfloat16, None, "heads of 128 and 0"),
        (64, 128, mx.bfloat16, None, "keys .* and values"),
        (192, 128, mx.bfloat16, Quantization(8, 64), "keys .* and values"),
        (128, 128, mx.int32, None, "int32"),
    ],
)
def test_heads_without_a_kernel_are_refused(
    dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    quantization: Quantization | None,
    message: str | None,
) -> None:
    new, pool = (
        KeysValues(*(mx.zeros((*shape, each), dtype) for each in (dim, value_dim)))
        for shape in ((3, 2, 1), (9, 2, PAGE_TOKENS))
    )
    if quantization:
        pool = KeysValues(*map(quantization.pack, pool))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check(mx.zeros((3, 6, 1, dim), dtype), new, pool, Scoring(0.1), quantization)


@pytest.mark.parametrize(
    ("queries", "keys", "pages", "dtypes", "scoring", "message"),
    [
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1, 9, mx.zeros(6), 5.0), None),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "fbb", Scoring(0.1), "queries .* and keys"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbf", Scoring(0.1), "over pages"),
        ((4, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1), "queries .* and keys"),
        ((3, 6, 1, 96), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1), "queries .* and keys"),
        ((3, 5, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1), "queries .* and keys"),
        ((3, 6, 1, 64), (3, 3, 1, 64), (2, 64, 64), "bbb", Scoring(0.1), "over pages"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 96), "bbb", Scoring(0.1), "over pages"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 32, 64), "bbb", Scoring(0.1), "over pages"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(-0.1), "times -0.1"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.0), "times 0.0"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(math.nan), "times nan"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1, softcap=0.0), "cap of 0"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1, 0), "window of 0"),
        ((3, 6, 1, 64), (3, 2, 1, 64), (2, 64, 64), "bbb", Scoring(0.1, 9, mx.zeros(2)), "sinks"),
    ],
)
def test_numbers_that_the_kernels_do_not_expect_are_refused(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    pages: tuple[int, ...],
    dtypes: str,
    scoring: Scoring,
    message: str | None,
) -> None:
    """A kernel would read behind an array's end, or write to the pages of others."""
    of_queries, of_keys, of_pages = ({"b": mx.bfloat16, "f": mx.float32}[each] for each in dtypes)
    new = KeysValues(*[mx.zeros(keys, of_keys)] * 2)
    buffers = KeysValues(*[mx.zeros((9, *pages), of_pages)] * 2)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check(mx.zeros(queries, of_queries), new, buffers, scoring, None)


def test_queries_of_another_type_never_reach_a_kernel() -> None:
    inputs = Sequences(Shape(1, 2, 64, mx.bfloat16), [Chunk(3, 1)])
    numbers = step_numbers(inputs.chunks, [], {None: inputs.lists})
    (kind,) = numbers.on_device(uploaded(numbers.parts, HostBuffers())).kinds.values()
    queries = inputs.queries.astype(mx.float32)
    with pytest.raises(ValueError, match="no kernel for queries"):
        CudaPages().attend(queries, inputs.new, inputs.pool, kind, Scoring(SCALE), None)
