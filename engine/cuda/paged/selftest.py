"""Tries the paged CUDA kernels against MLX's own operations, once, before a model uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.cache.pages.step import ChunkPlace
from chairlift.engine.cuda.paged.arrays import ChunkStep, TokenStep
from chairlift.engine.cuda.paged.chunk_attention import TALL_TOKENS, chunk_attention, tile_rows
from chairlift.engine.cuda.paged.copy_pages import copy_pages
from chairlift.engine.cuda.paged.put import put
from chairlift.engine.cuda.paged.tiles import Form, Tiling, chunk_tiles
from chairlift.engine.cuda.paged.token_attention import token_attention
from chairlift.engine.model.trials.trial import Trial, elementwise, identical

log = logging.getLogger(__name__)

# bfloat16 has eight bits, and the reference rounds at other places than the kernels.
TOLERANCE = 0.02
_ERROR = "no CUDA kernels for attention, MLX's own is used: %s"
_MISMATCH = "the CUDA kernels for attention are wrong on this device; MLX's own is used"
ATTENTION_TRIAL = Trial(
    elementwise(TOLERANCE), log, error=_ERROR, level=logging.WARNING, mismatch=_MISMATCH
)
_PUT_TRIAL = Trial(identical, log, error=_ERROR, level=logging.WARNING, mismatch=_MISMATCH)

_KEY_HEADS, _GROUP, _DIM, _SCALE = 2, 4, 128, 0.1
# Old and new tokens of prompt chunks, at and around the ends of pages and of tiles. The last one
# has so many columns that several blocks compute them.
_CHUNKS = ((0, 70), (130, 21), (64, 1), (1060, 20))
# Old tokens of the rows before them.
_ROWS = (37, 300)


def kernels_work() -> bool:
    """Whether the kernels compile here and compute the same as MLX's own operations."""
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    return (
        all(
            tokens_right(count, window, sinks)
            for count, window in ((1, None), (256, 100))
            for sinks in (False, True)
        )
        and chunks_right(window=None, with_sinks=False, tile=tile_rows(_DIM, 0))
        and chunks_right(window=100, with_sinks=True, tile=tile_rows(_DIM, TALL_TOKENS))
        and put_right()
        and copies_right()
    )


def tokens_right(count: int, window: int | None, with_sinks: bool) -> bool:
    """Tries ``token_attention`` of ``count`` tokens; a few are of a prompt, if there are many.

    The kernel splits a token's columns among several blocks only if there are few tokens.
    """
    prompt = min(5, count - 1)
    sequences = [(i * 37 % 250, 1) for i in range(count - prompt)]
    inputs = _inputs(sequences + [(62, prompt)] * bool(prompt), with_sinks)
    stops = inputs.positions + 1
    lengths = mx.minimum(stops, window or stops)
    step = inputs.step(lengths)
    return _right(
        inputs,
        window,
        lambda: token_attention(
            *(inputs.queries, inputs.new, inputs.pool, step, inputs.limit, _SCALE, inputs.sinks)
        ),
    )


def chunks_right(window: int | None, with_sinks: bool, tile: int) -> bool:
    """Tries ``chunk_attention`` of several chunks at once, behind rows whose results it copies.

    Tiles have ``tile`` rows.
    """
    rows = len(_ROWS)
    inputs = _inputs([*((old, 1) for old in _ROWS), *_CHUNKS], with_sinks)
    firsts = accumulate((new for _, new in _CHUNKS), initial=rows)
    places = [
        ChunkPlace(first, old, new, row)
        for row, (first, (old, new)) in enumerate(zip(firsts, _CHUNKS, strict=False), rows)
    ]
    tiles, slots = chunk_tiles(places, rows, Tiling(Form(_KEY_HEADS, _GROUP, _DIM, window), tile))
    stops = inputs.positions + 1
    lengths = mx.where(mx.arange(stops.size) < rows, mx.minimum(stops, window or stops), 0)
    tokens = inputs.step(lengths)

    def ours() -> mx.array:
        own = inputs.queries, inputs.new, inputs.pool
        decoded = token_attention(*own, tokens, inputs.limit, _SCALE, inputs.sinks, count=rows + 1)
        step = ChunkStep(inputs.pages, mx.array(tiles), tile, slots, lengths, decoded)
        return chunk_attention(*own, step, _SCALE, window, inputs.sinks)

    return _right(inputs, window, ours)


def put_right() -> bool:
    """Tries to write tokens into two pages, and nothing else there."""
    places = mx.array([PAGE_TOKENS * 3 + 5, PAGE_TOKENS * 3 + 4, 0, PAGE_TOKENS - 1], mx.int32)
    shape = (4, _KEY_HEADS, PAGE_TOKENS, _DIM)
    pool = KeysValues(*(mx.zeros(shape, mx.bfloat16) for _ in range(2)))
    # Parts of wider arrays, as a prompt's chunks are.
    new = KeysValues(*(_random(1, _KEY_HEADS, 7, seed=seed)[:, :, 3:] for seed in range(2)))
    mx.eval(pool, new, places)

    def ours() -> mx.array:
        mx.eval(put(pool, new, places))
        return mx.stack(list(pool))

    def mlx() -> mx.array:
        expected = mx.zeros((2, *shape), mx.bfloat16)
        where = slice(None), places // PAGE_TOKENS, slice(None), places % PAGE_TOKENS
        expected[where] = mx.stack([array[0].swapaxes(0, 1) for array in new], axis=1)
        return expected

    return _PUT_TRIAL.passes(mlx, ours)


def copies_right() -> bool:
    """Tries to copy two pages, and to change no others."""
    shape = (5, _KEY_HEADS, PAGE_TOKENS)
    pool = KeysValues(*(_random(*shape, seed=seed) for seed in (1, 2)))
    pairs = mx.array([[4, 2], [1, 3]], mx.int32)
    expected = mx.stack([array[mx.array([0, 1, 4, 1, 4])] for array in pool])
    mx.eval(pool, pairs, expected)

    def ours() -> mx.array:
        mx.eval(copy_pages(pool, pairs))
        return mx.stack(list(pool))

    return _PUT_TRIAL.passes(lambda: expected, ours)


class _Inputs(NamedTuple):
    """A step's arrays; each sequence's pages are anywhere in the pool, without its new tokens.

    Attributes:
        tables: ``[sequences, pages]``, the same as ``pages``.
    """

    queries: mx.array
    new: KeysValues
    pool: KeysValues
    tables: mx.array
    pages: mx.array
    owners: mx.array
    begins: mx.array
    positions: mx.array
    sinks: mx.array | None

    def step(self, lengths: mx.array) -> TokenStep:
        """The step, in which each token sees ``lengths`` columns."""
        return TokenStep(self.pages, self.owners, self.begins, lengths, self.positions + 1)

    @property
    def limit(self) -> int:
        """An upper bound of the columns that a token sees."""
        return self.tables.shape[1] * PAGE_TOKENS


def _inputs(sequences: Sequence[tuple[int, int]], with_sinks: bool) -> _Inputs:
    """Random arrays for sequences of so many old and new tokens."""
    tokens = [
        (row, old, position)
        for row, (old, new) in enumerate(sequences)
        for position in range(old, old + new)
    ]
    owners, begins, positions = (mx.array(column, mx.int32) for column in zip(*tokens, strict=True))
    width = -(-max(old + new for old, new in sequences) // PAGE_TOKENS)
    numbers = mx.random.permutation(1 + len(sequences) * width, key=mx.random.key(0))
    tables = numbers[1:].reshape(-1, width).astype(mx.int32)
    lists = PageLists(width * np.arange(len(sequences), dtype=np.int32), np.array(tables).ravel())
    pages = mx.array(page_table(lists, len(sequences)))
    shape = (len(numbers), _KEY_HEADS, PAGE_TOKENS)
    pool = KeysValues(*(_random(*shape, seed=seed) for seed in (1, 2)))
    places = tables[owners, positions // PAGE_TOKENS], slice(None), positions % PAGE_TOKENS
    new = KeysValues(*(buffer[places][:, :, None] for buffer in pool))
    mx.eval(new)
    for buffer in pool:
        buffer[places] = float("nan")
    heads = _KEY_HEADS * _GROUP
    queries = _random(len(tokens), heads, 1, seed=3)
    sinks = _random(heads, seed=4)[:, 0] if with_sinks else None
    inputs = _Inputs(queries, new, pool, tables, pages, owners, begins, positions, sinks)
    mx.eval(inputs)
    return inputs


def _right(inputs: _Inputs, window: int | None, kernel: Callable[[], mx.array]) -> bool:
    """Compares a kernel with MLX's attention to the columns in the pool."""

    def ours() -> mx.array:
        result = kernel()
        mx.eval(result)
        return result

    def mlx() -> mx.array:
        keys, values = (
            buffer[inputs.tables].swapaxes(1, 2).flatten(2, 3)[inputs.owners]
            for buffer in inputs.pool
        )
        behind = inputs.positions[:, None] - mx.arange(keys.shape[2])
        mask = (behind >= 0) & (behind < (window or keys.shape[2]))
        return mx.fast.scaled_dot_product_attention(
            inputs.queries,
            keys,
            values,
            scale=_SCALE,
            mask=mask[:, None, None],
            sinks=inputs.sinks,
        )

    # NOTE: the kernel runs first: it writes the columns that the reference reads.
    result = ATTENTION_TRIAL.attempt(ours)
    return result is not None and ATTENTION_TRIAL.passes(mlx, lambda: result)


def _random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal((*shape, _DIM), mx.bfloat16, key=mx.random.key(seed))
