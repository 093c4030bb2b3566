"""Sequences in shuffled pages, NaN wherever no kernel may read, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.paged.token_attention import DIM_MULTIPLE, MAX_DIM

SCALE = 0.15  # of the scores
_BITS = {2: mx.uint16, 4: mx.uint32}


def unpacked(packed: mx.array, quantization: Quantization, dim: int, dtype: mx.Dtype) -> mx.array:
    """``Quantization.unpack``, rounded to ``dtype`` only at the end, as the kernels do it."""
    codes = dim * quantization.bits // 32
    parts = packed[..., codes:].view(dtype).astype(mx.float32)
    scales, biases = mx.split(parts, 2, axis=-1)
    exact = mx.dequantize(
        packed[..., :codes], scales, biases, group_size=quantization.group, bits=quantization.bits
    )
    return exact.astype(dtype)


class Chunk(NamedTuple):
    """A sequence's ``new`` tokens in a step, after ``old`` ones."""

    old: int
    new: int


class Shape(NamedTuple):
    key_heads: int
    group: int
    dim: int
    dtype: mx.Dtype
    window: int | None = None
    sinks: bool = False
    quantization: Quantization | None = None
    value_dim: int | None = None
    softcap: float | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """The numbers of a key and of a value."""
        return self.dim, self.value_dim or self.dim


@st.composite
def shapes(draw: st.DrawFn, *dtypes: mx.Dtype) -> Shape:
    """Shapes of any dimensions that the kernels take."""
    numbers = st.integers(1, MAX_DIM // DIM_MULTIPLE).map(lambda each: each * DIM_MULTIPLE)
    value_dim, dim = sorted([draw(numbers), draw(numbers)])
    group, window = draw(st.integers(1, 5)), draw(st.none() | st.integers(1, 99))
    sinks = draw(st.booleans())
    softcap = draw(st.sampled_from([None, 2.0]))
    dtype = draw(st.sampled_from(dtypes))
    return Shape(1, group, dim, dtype, window, sinks, None, value_dim, softcap)


@dataclass
class Sequences:
    """The inputs of one step, made from a seed.

    Attributes:
        queries, new, pool, pages, sinks: as the kernels take them; page 0 of the pool is free.
        lists: the sequences' pages.
        whole: of each chunk, keys and values ``[key heads, old + new, dim]``.
        packed: the same as the pool has them; the numbers of ``whole`` if it is not quantized.
    """

    shape: Shape
    chunks: Sequence[Chunk]
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        heads = self.shape.key_heads * self.shape.group
        tokens = sum(chunk.new for chunk in self.chunks)
        self.queries = self._random(rng, tokens, heads, 1, self.shape.dim)
        self.sinks = mx.array(rng.normal(size=heads)) if self.shape.sinks else None
        needed = [-(-sum(chunk) // PAGE_TOKENS) for chunk in self.chunks]
        pages = 1 + rng.permutation(sum(needed) + 1)  # one more is free
        starts = np.cumsum([0, *needed[:-1]])
        self.lists = PageLists(starts.astype(np.int32), pages[: sum(needed)].astype(np.int32))
        self.pages = mx.array(page_table(self.lists, len(self.chunks)))
        self.packed = [
            [
                self._packed(self._random(rng, self.shape.key_heads, sum(chunk), dim))
                for dim in self.shape.dims
            ]
            for chunk in self.chunks
        ]
        self.whole = [list(map(self._unpacked, pair, self.shape.dims)) for pair in self.packed]
        self.new = KeysValues(*(self._of_step(of) for of in range(2)))
        self.pool = KeysValues(*(self._pooled(of, self._visible) for of in range(2)))

    def expected(self) -> np.ndarray:
        """``[tokens, heads, 1, value dim]``."""
        queries, results = np.array(self.queries.astype(mx.float32))[:, :, 0], []
        for chunk, (keys, values) in zip(self.chunks, self.whole, strict=True):
            results.append(self._attended(queries[: chunk.new], chunk, keys, values))
            queries = queries[chunk.new :]
        return np.concatenate(results)[:, :, None]

    def check(self, result: mx.array) -> None:
        """Asserts the result, and that the pool has its old tokens, the new ones, nothing else."""
        tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}[self.shape.dtype]
        assert result.dtype == self.shape.dtype
        np.testing.assert_allclose(
            np.array(result.astype(mx.float32)), self.expected(), rtol=tolerance, atol=tolerance
        )
        for of, buffer in enumerate(self.pool):
            written = self._pooled(of, self._written)
            bits = (np.array(array.view(_BITS[array.itemsize])) for array in (buffer, written))
            np.testing.assert_array_equal(*bits)

    def positions(self) -> list[tuple[int, Chunk, int]]:
        """Of each token: its line of the pages, its chunk, its position."""
        return [
            (row, chunk, chunk.old + i)
            for row, chunk in enumerate(self.chunks)
            for i in range(chunk.new)
        ]

    def seen(self, position: int) -> int:
        return min(position + 1, self.shape.window or position + 1)

    def _random(self, rng: np.random.Generator, *shape: int) -> mx.array:
        numbers = rng.normal(size=shape).astype(np.float32)
        return mx.array(numbers).astype(self.shape.dtype)

    def _packed(self, numbers: mx.array) -> np.ndarray:
        if self.shape.quantization is None:
            return np.array(numbers.astype(mx.float32))
        return np.array(self.shape.quantization.pack(numbers))

    def _unpacked(self, packed: np.ndarray, dim: int) -> np.ndarray:
        if self.shape.quantization is None:
            return packed
        numbers = unpacked(mx.array(packed), self.shape.quantization, dim, self.shape.dtype)
        return np.array(numbers.astype(mx.float32))

    def _written(self, chunk: Chunk) -> range:
        """The columns that the pool has afterwards; attention writes no packed ones."""
        old = self._visible(chunk)
        return old if self.shape.quantization else range(old.start, sum(chunk))

    def _visible(self, chunk: Chunk) -> range:
        """The columns of the pool that some query of the chunk sees."""
        return range(chunk.old + 1 - self.seen(chunk.old), chunk.old)

    def _of_step(self, of: int) -> mx.array:
        parts = [
            whole[of][:, chunk.old :].swapaxes(0, 1)
            for chunk, whole in zip(self.chunks, self.whole, strict=True)
        ]
        return mx.array(np.concatenate(parts)[:, :, None]).astype(self.shape.dtype)

    def _pooled(self, of: int, columns: Callable[[Chunk], range]) -> mx.array:
        pages = int(self.lists.pages.max()) + 2
        like = self.packed[0][of]
        # Packed, these bits are NaN as a scale.
        never = np.nan if like.dtype == np.float32 else 0xFFFFFFFF
        shape = (pages, self.shape.key_heads, PAGE_TOKENS, like.shape[-1])
        pool = np.full(shape, never, like.dtype)
        parts = zip(self.lists.starts, self.chunks, self.packed, strict=True)
        for start, chunk, packed in parts:
            for p in columns(chunk):
                page = self.lists.pages[start + p // PAGE_TOKENS]
                pool[page, :, p % PAGE_TOKENS] = packed[of][:, p]
        result = mx.array(pool)
        if self.shape.quantization is None:
            result = result.astype(self.shape.dtype)
        mx.eval(result)
        return result

    def _attended(
        self, queries: np.ndarray, chunk: Chunk, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        keys, values = (array.repeat(self.shape.group, axis=0) for array in (keys, values))
        scores = np.einsum("thd,hcd->thc", queries, keys) * SCALE
        if (cap := self.shape.softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        positions = np.arange(chunk.old, sum(chunk))[:, None]
        columns = np.arange(sum(chunk))
        window = self.shape.window or sum(chunk)
        hidden = (columns > positions) | (columns <= positions - window)
        scores = np.where(hidden[:, None], -np.inf, scores)
        if self.sinks is not None:
            sinks = np.broadcast_to(np.array(self.sinks)[:, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sinks], axis=2)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        return np.einsum("thc,hcd->thd", weights[..., : sum(chunk)], values)
