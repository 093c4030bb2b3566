"""Every kernel compiles for a GPU, and what a thread uses fits into registers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import pytest
from emulator.kernels import kernels_of
from emulator.nvrtc import Compiled, CompiledKernel, folder, missing, write_record

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.step import ChunkPlace
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda import gated_delta, grouped, heads, low_rank, sampling, skinny, tiled
from chairlift.engine.cuda.grouped import FORMS, Weights, grouped_product
from chairlift.engine.cuda.heads import HeadNorms, Heads, split_heads, swiglu
from chairlift.engine.cuda.low_rank import add_low_rank
from chairlift.engine.cuda.paged import (
    chunk_attention,
    copy_pages,
    latent_attention,
    packing,
    put,
    token_attention,
)
from chairlift.engine.cuda.paged.arrays import ChunkStep, TokenStep
from chairlift.engine.cuda.paged.tiles import Form, Tiling, chunk_tiles
from chairlift.engine.cuda.sampling import DTYPES, Draws, sample
from chairlift.engine.cuda.skinny import Norm, skinny_product
from chairlift.engine.cuda.tiled import LARGE, SMALL, tiled_product

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(folder() is None, reason="needs NVIDIA's compiler (make dev)"),
]

MODULES: list[ModuleType] = [
    *(chunk_attention, token_attention, latent_attention, put, packing, copy_pages),
    *(gated_delta, heads, grouped, low_rank, sampling, skinny, tiled),
]
EIGHT, FOUR = Quantization(8, 64), Quantization(4, 32)
# Inputs of products: enough for eight warps.
INPUTS = 1024
# Threads of a block take no more registers than this, or a launch fails.
MAX_REGISTERS = 255


@pytest.fixture(scope="module", autouse=True)
def _recorded() -> Iterator[None]:
    """Compares this process's kernels with the record once all have been compiled."""
    yield
    write_record()
    assert not missing(), "kernels have changed: run `make kernels`"


@pytest.fixture
def compiled() -> Iterator[list[Compiled]]:
    """The kernels that the test has compiled."""
    done: list[Compiled] = []
    with kernels_of(functools.partial(CompiledKernel, done=done), *MODULES):
        yield done
    assert done
    for kernel in done:
        assert 0 < kernel.registers <= MAX_REGISTERS, kernel
        assert not kernel.spilled, kernel


def _numbers(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.zeros(shape, dtype)


def _layer(
    tokens: int,
    group: int,
    dim: int,
    dtype: mx.Dtype,
    quantization: Quantization | None,
    value_dim: int | None = None,
) -> tuple[mx.array, KeysValues, KeysValues]:
    """Queries, new keys and values, and a pool of nine pages, with one key head."""
    new, pool = (
        KeysValues(*(_numbers(*shape, own, dtype=dtype) for own in (dim, value_dim or dim)))
        for shape in ((tokens, 1, 1), (9, 1, PAGE_TOKENS))
    )
    if quantization:
        pool = KeysValues(*map(quantization.pack, pool))
    return _numbers(tokens, group, 1, dim, dtype=dtype), new, pool


def _chunks(group: int, dim: int, decoded: mx.array) -> ChunkStep:
    """A step of one chunk of nine tokens; the kernel is compiled for tiles of each height."""
    rows = chunk_attention.SHORT
    tiling = Tiling(Form(1, group, dim, None), rows)
    tiles, slots = chunk_tiles([ChunkPlace(0, 0, 9, 0)], 0, tiling)
    lengths = _numbers(9, dtype=mx.int32)
    pages = _numbers(8, dtype=mx.int32)
    return ChunkStep(pages, mx.array(tiles), rows, slots, lengths, decoded)


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "quantization"),
    [
        (64, 8, mx.bfloat16, None),
        (256, 2, mx.float16, None),
        (160, 4, mx.bfloat16, None),
        (128, 4, mx.float32, None),
        (128, 4, mx.bfloat16, EIGHT),
        (256, 2, mx.float16, FOUR),
    ],
)
def test_attention_of_tokens_compiles(
    dim: int,
    group: int,
    dtype: mx.Dtype,
    quantization: Quantization | None,
    compiled: list[Compiled],
) -> None:
    queries, new, pool = _layer(1, group, dim, dtype, quantization)
    zeros = _numbers(1, dtype=mx.int32)
    step = TokenStep(_numbers(8, dtype=mx.int32), zeros, zeros, zeros, zeros)
    sinks = _numbers(group) if dim == 64 else None
    token_attention.token_attention(
        queries, new, pool, step, 512, 0.1, sinks, quantization=quantization
    )


@pytest.mark.parametrize("ample", [False, True])
@pytest.mark.parametrize(
    ("dim", "group", "dtype", "quantization"),
    [
        (64, 8, mx.bfloat16, None),
        (128, 4, mx.bfloat16, None),
        (144, 16, mx.bfloat16, None),
        (224, 2, mx.float16, None),
        (256, 2, mx.float16, None),
        (128, 4, mx.bfloat16, EIGHT),
        (256, 2, mx.float16, FOUR),
    ],
)
def test_attention_of_chunks_compiles(
    dim: int,
    group: int,
    dtype: mx.Dtype,
    quantization: Quantization | None,
    ample: bool,
    compiled: list[Compiled],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_attention, "ample_shared", lambda: ample)
    queries, new, pool = _layer(9, group, dim, dtype, quantization)
    step = _chunks(group, dim, queries)
    chunk_attention.chunk_attention(queries, new, pool, step, 0.1, quantization=quantization)


def test_attention_with_shorter_values_compiles(compiled: list[Compiled]) -> None:
    queries, new, pool = _layer(9, 16, 192, mx.bfloat16, None, value_dim=128)
    zeros, one = _numbers(9, dtype=mx.int32), _numbers(8, dtype=mx.int32)
    tokens = TokenStep(one, zeros, zeros, zeros, zeros)
    single = token_attention.token_attention(queries, new, pool, tokens, 512, 0.1)
    assert single.shape == (9, 16, 1, 128)
    chunks = _chunks(16, 192, single)
    result = chunk_attention.chunk_attention(queries, new, pool, chunks, 0.1)
    assert result.shape == (9, 16, 1, 128)


@pytest.mark.parametrize("ample", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(128, mx.bfloat16), (256, mx.float16)])
def test_attention_with_capped_scores_compiles(
    dim: int,
    dtype: mx.Dtype,
    ample: bool,
    compiled: list[Compiled],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_attention, "ample_shared", lambda: ample)
    queries, new, pool = _layer(9, 2, dim, dtype, None)
    zeros, one = _numbers(9, dtype=mx.int32), _numbers(8, dtype=mx.int32)
    tokens = TokenStep(one, zeros, zeros, zeros, zeros)
    single = token_attention.token_attention(queries, new, pool, tokens, 512, 0.1, softcap=50.0)
    chunks = _chunks(2, dim, single)
    chunk_attention.chunk_attention(queries, new, pool, chunks, 0.1, softcap=50.0)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("latent", [256, 512])
def test_latent_attention_compiles(heads: int, latent: int, compiled: list[Compiled]) -> None:
    new, pool = (
        KeysValues(*(_numbers(*shape, dim) for dim in (latent, 64)))
        for shape in ((1, 1, 1), (9, 1, PAGE_TOKENS))
    )
    queries, rotary = (_numbers(1, heads, 1, dim) for dim in (latent, 64))
    zeros = _numbers(1, dtype=mx.int32)
    step = TokenStep(_numbers(8, dtype=mx.int32), zeros, zeros, zeros, zeros)
    latent_attention.latent_attention(queries, rotary, new, pool, step, 512, 0.1)


@pytest.mark.parametrize("quantization", [EIGHT, FOUR])
def test_packing_of_keys_compiles(quantization: Quantization, compiled: list[Compiled]) -> None:
    _, new, pool = _layer(3, 1, 128, mx.bfloat16, quantization)
    own = _numbers(3, dtype=mx.int32)
    packing.pack(new, pool, _numbers(8, dtype=mx.int32), own, own, quantization)


def test_kernels_beside_attention_compile(compiled: list[Compiled]) -> None:
    pool = KeysValues(*[_numbers(2, 1, PAGE_TOKENS, 128)] * 2)
    put.put(pool, KeysValues(*[_numbers(1, 1, 3, 128)] * 2), _numbers(3, dtype=mx.int32))
    copy_pages.copy_pages(pool, _numbers(1, 2, dtype=mx.int32))
    norms = HeadNorms(_numbers(128), _numbers(128), 1e-6)
    shape = Heads(4, 1, 128, _numbers(64, dtype=mx.float32), norms, None)
    split_heads(_numbers(2, 1, 6 * 128), _numbers(2, dtype=mx.int32), shape)
    swiglu(_numbers(2, 1, 64))
    own = _numbers(2, dtype=mx.int32)
    add_low_rank(_numbers(2, 64), _numbers(2, 64), own, _numbers(1, 8, 64), _numbers(1, 8, 64))


@pytest.mark.parametrize(
    ("dim", "vector", "masked", "dtype"),
    [
        (128, False, False, mx.bfloat16),
        (128, True, True, mx.bfloat16),
        (256, False, True, mx.float32),
        (32, True, False, mx.float16),
    ],
)
def test_the_gated_delta_rule_compiles(
    dim: int, vector: bool, masked: bool, dtype: mx.Dtype, compiled: list[Compiled]
) -> None:
    """With decays and betas of either width."""
    q, v = _numbers(2, 3, 1, dim, dtype=dtype), _numbers(2, 3, 2, 40, dtype=dtype)
    beta = _numbers(2, 3, 2, dtype=dtype)
    g = _numbers(2, 3, 2, *[dim] * vector, dtype=mx.float32 if vector else dtype)
    state = _numbers(2, 2, 40, dim, dtype=mx.float32)
    mask = mx.ones((2, 3), mx.bool_) if masked else None
    gated_delta.gated_delta(q, q, v, g, beta, state, mask)
    if not vector:
        gated_delta.decayed(q, q, v, g, state)


# Products of so many rows of a weight have blocks of eight, four and two warps.
OUTPUTS = (64, 9600, 38400)
AFFINE = ((0, 0, "affine"), (4, 32, "affine"), (8, 32, "affine"))
# Each form with each block, half of them with either type of input, which changes a few
# instructions of a kernel: compilations of both took a third of the time of all tests here.
PRODUCTS = [
    (form, outputs, (mx.bfloat16, mx.float16)[(first + second) % 2])
    for first, form in enumerate((*AFFINE, *((*FORMS[mode], mode) for mode in FORMS)))
    for second, outputs in enumerate(OUTPUTS)
]


@pytest.mark.parametrize(("form", "outputs", "dtype"), PRODUCTS)
def test_products_of_experts_compile(
    form: tuple[int, int, str], outputs: int, dtype: mx.Dtype, compiled: list[Compiled]
) -> None:
    """Of a single expert, of experts with few and with many tokens, and of unsorted pairs."""
    for experts, pairs, listed in ((1, 3, False), (2, 3, False), (2, 99, False), (2, 3, True)):
        weights = _weights(form, experts, outputs, dtype)
        x, own = _numbers(pairs, INPUTS, dtype=dtype), _numbers(pairs, dtype=mx.uint32)
        grouped_product(x, own, weights, listed=listed)


def _weights(form: tuple[int, int, str], experts: int, outputs: int, dtype: mx.Dtype) -> Weights:
    bits, group, mode = form
    weights = Weights(_numbers(experts, outputs, INPUTS, dtype=dtype))
    if bits:
        words = _numbers(experts, outputs, INPUTS * bits // 32, dtype=mx.uint32)
        groups, floats = (experts, outputs, INPUTS // group), mode != "affine"
        scales = _numbers(*groups, dtype=mx.uint8 if floats else dtype)
        biases = None if floats else _numbers(*groups, dtype=dtype)
        weights = Weights(words, scales, biases, bits, group, None, mode, dtype)
    assert weights.are_fit
    return weights


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("form", [*AFFINE, *((*FORMS[mode], mode) for mode in FORMS)])
def test_products_in_tiles_compile(
    form: tuple[int, int, str],
    dtype: mx.Dtype,
    compiled: list[Compiled],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ample shared memory, which has room for more inputs at a time, and without."""
    weights = _weights(form, 2, 128, dtype)
    x, own = _numbers(3, INPUTS, dtype=dtype), _numbers(3, dtype=mx.uint32)
    for tokens, ample in ((SMALL, False), (LARGE, False), (LARGE, True)):
        monkeypatch.setattr(tiled, "ample_shared", functools.partial(bool, ample))
        tiled_product(x, own, weights, tokens)


@pytest.mark.parametrize("outputs", [4096, 6144, 8192, 24576])
def test_products_of_few_tokens_compile(outputs: int, compiled: list[Compiled]) -> None:
    """The limit of registers depends on the warps of a block, which the kernel is told."""
    x, weight = _numbers(9, 64), _numbers(outputs, 64)
    norm = Norm(_numbers(64), 1e-6)
    skinny_product(x, weight, norm)
    skinny_product(x, weight, norm, gated=True)
    skinny_product(x, weight, to=_numbers(9, outputs))


def test_an_error_of_the_compiler_is_shown() -> None:
    kernel = CompiledKernel(
        done=[], name="broken", input_names=["x"], output_names=["y"], source="y[0] = unknown;"
    )
    with pytest.raises(RuntimeError, match="unknown"):
        kernel(
            inputs=[_numbers(1)],
            template=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )


# Threads read several logits at a time where the vocabulary is a multiple of them.
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [*((1000, dtype) for dtype in DTYPES), (1001, mx.bfloat16)], ids=str
)
def test_sampling(compiled: list[Compiled], vocabulary: int, dtype: mx.Dtype) -> None:
    raw = _numbers(2, vocabulary, dtype=dtype)
    draws = Draws(_numbers(4, 2, dtype=mx.float32), _numbers(2, 64, dtype=mx.float32))
    for logits, changed in ((raw, None), (raw.astype(mx.float32), raw)):
        sample(logits, changed, True, draws, -1, -2, 16)
    for kernel in compiled:
        assert kernel.registers <= 128, kernel  # or a block of 512 threads cannot be launched
