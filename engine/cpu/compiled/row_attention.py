"""Attention of rows with any numbers of new tokens, each computed for its row's columns only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.cache.layer import HostPlaces
from chairlift.cache.packed.host_step import HostStep
from chairlift.engine.cpu.compiled import worker_threads
from chairlift.engine.cpu.compiled.attention_tiles import Form, Tiles, tiles_of
from chairlift.engine.cpu.compiled.jobs import (
    MIN_SHARED,
    NoProgramError,
    Program,
    ProgramChain,
    run_shared,
)
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function
from chairlift.engine.cpu.compiled.llvm.kernel import Kernel
from chairlift.engine.cpu.compiled.llvm.row_attention.kernel import MAX_QUERIES
from chairlift.engine.cpu.gemm import Floats


def supports(queries: Floats, keys: NDArray[Any], values: NDArray[Any]) -> bool:
    """Whether there is a kernel, and it reads arrays of this form; see ``attend``."""
    kernel = llvm_kernel.compiled()
    if kernel is None:
        return False
    _, heads, line = queries.shape
    key_heads, dim, width = keys.shape[1], keys.shape[3], values.shape[3]
    return (
        keys.dtype == values.dtype
        and keys.dtype in (np.float32, np.float16)
        and keys.strides[3] == values.strides[3] == keys.itemsize
        and keys.shape[:3] == values.shape[:3]
        and line in (dim, dim + width)
        and dim % kernel.outputs == width % kernel.outputs == 0
        and heads % key_heads == 0
        and heads // key_heads <= MAX_QUERIES
    )


def attend(
    queries: Floats,
    keys: NDArray[Any],
    values: NDArray[Any],
    counts: Sequence[int],
    begun: Sequence[int],
    scale: float,
    starts: Sequence[int] | None = None,
    sinks: Floats | None = None,
    softcap: float | None = None,
) -> Floats:
    """Causal attention of each row's new tokens to all of its columns, from the first one on.

    Args:
        queries: ``[tokens, heads, dim]``, row by row; see ``supports``. If the values are a part of
            the keys, as in multi-head latent attention, those for ``keys`` and, behind them, those
            for ``values``.
        keys, values: ``[rows, key heads, columns, dim]`` of float32 or float16, which contain the
            new tokens.
        counts: the number of new tokens of each row.
        begun: each row's columns before its new tokens.
        starts: the first of each row's columns, behind the last of which the first of its buffer
            follows; None: the first of its buffer.
        sinks: ``[heads]``, a score of each head that takes weight but adds no value.
        softcap: bounds the scores: ``softcap * tanh(score / softcap)``; None: nothing does.

    Returns:
        ``[tokens, heads, value dim]``.
    """
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    scaled = np.multiply(queries, np.float32(scale), order="C")
    result = np.empty((*queries.shape[:2], values.shape[3]), np.float32)
    addresses = [array.ctypes.data for array in (scaled, keys, values, result)]
    starts = [0] * len(counts) if starts is None else starts
    given = _Given(sinks, softcap)
    job = _job(scaled.shape, keys, values, addresses, given.addresses, counts, begun, starts)
    run_shared(_rows(kernel, keys), *job.arguments, parts=job.parts, is_shared=job.is_shared)
    return result


class _Given:
    """The memory of what changes the scores of all tokens; see ``attend``.

    Attributes:
        addresses: of the sinks and of the cap; 0: none.
    """

    def __init__(self, sinks: Floats | None, softcap: float | None) -> None:
        self._sinks = None if sinks is None else np.ascontiguousarray(sinks, np.float32)
        self._cap = None if softcap is None else np.array([softcap], np.float32)
        arrays = self._sinks, self._cap
        self.addresses = tuple(0 if each is None else each.ctypes.data for each in arrays)


@functools.cache
def reads_half() -> bool:
    """Whether the kernel exists, and computes the same from float16 as from float32."""
    kernel = llvm_kernel.compiled()
    if kernel is None:
        return False
    columns, rng = 2 * kernel.outputs + 1, np.random.default_rng(0)
    queries = rng.normal(size=(2, 1, kernel.outputs)).astype(np.float32)
    shape = 1, 1, columns, kernel.outputs
    keys, values = (rng.normal(size=shape).astype(np.float16) for _ in range(2))
    own = attend(queries, keys, values, [2], [columns - 2], 1.0)
    wide = keys.astype(np.float32), values.astype(np.float32)
    return np.array_equal(own, attend(queries, *wide, [2], [columns - 2], 1.0))


class AttentionJobs:
    """Jobs of a program: they write a step's keys and values to a cache, and attend to it.

    Attributes:
        form: jobs of the same form differ only in the buffers of their cache.

    Args:
        program: gets the jobs.
        queries, keys, values: ``[tokens, heads, dim]``, whose tokens need not be adjacent. Without
            new keys and values (of no tokens), only attention is computed. In multi-head latent
            attention the cache has latents as keys, and rotary keys in place of values; the queries
            are those for rotary keys and, behind them, those for latents.
        scaled: contiguous memory of the queries' shape; the queries themselves if they are
            multiplied by the scale already.
        result: ``[tokens, heads, value dim]``, contiguous.
        sinks, softcap: see ``attend``.

    Raises:
        NoProgramError: there is no kernel for such heads.
    """

    def __init__(
        self,
        program: Program,
        queries: Floats,
        keys: Floats,
        values: Floats,
        scaled: Floats,
        result: Floats,
        scale: float,
        sinks: Floats | None = None,
        softcap: float | None = None,
    ) -> None:
        kernel = llvm_kernel.compiled()
        tokens, heads, dim = queries.shape
        if kernel is None or dim % kernel.outputs:
            raise NoProgramError
        self._kernel, self._program, self._scaled = kernel, program, scaled
        self._is_latent = keys.shape[2] != dim
        self._new = [
            (new.ctypes.data, new.strides[0] // new.itemsize, *new.shape) for new in (keys, values)
        ]
        # Getting an array's address takes longer than making a job's other arguments.
        self._addresses = scaled.ctypes.data, result.ctypes.data
        self._scale = np.array([scale], np.float32)
        self._given = _Given(sinks, softcap)
        if queries is not scaled:
            program.add(
                kernel.scale,
                *(queries.ctypes.data, self._scale.ctypes.data, scaled.ctypes.data, heads * dim),
                *(queries.strides[0] // queries.itemsize, heads * dim),
                parts=tokens,
                is_shared=queries.size >= MIN_SHARED,
            )
        self._scatters = [program.add(kernel.scatter, parts=0, is_shared=False) for _ in range(2)]
        self._attend = program.add(kernel.rows, parts=0, is_shared=False)
        numbers = *self._scatters, self._attend
        addresses = *self._addresses, *self._given.addresses
        self.form = (*self._new, *addresses, *scaled.shape, scale, *numbers)

    def point(self, step: HostStep) -> bool:
        """Sets where the keys and values of the next run are written.

        Returns:
            Whether the kernel reads a cache of this form.
        """
        places = step.places
        read = places.keys, places.values
        cached = places.keys.ctypes.data, places.values.ctypes.data
        scaled, result = self._addresses
        addresses = scaled, *cached, result
        if self._is_latent:
            read = of_latents(self._scaled.shape[1], *read, len(step.counts))
            addresses = scaled, *cached[::-1], result
        if not supports(self._scaled, *read):
            return False
        written = places.rows.ctypes.data, places.columns.ctypes.data
        half = places.keys.dtype == np.float16
        scatter = self._kernel.scatter_half if half else self._kernel.scatter
        for number, (new, line, tokens, heads, dim), buffer, address in zip(
            self._scatters, self._new, (places.keys, places.values), cached, strict=True
        ):
            self._program.change(
                number,
                scatter,
                *(new, address, *written, heads, dim, line),
                *(stride // buffer.itemsize for stride in buffer.strides[:3]),
                parts=tokens,
                is_shared=tokens * heads * dim >= MIN_SHARED,
            )
        rows = step.counts, step.begun, step.starts
        job = _job(self._scaled.shape, *read, addresses, self._given.addresses, *rows)
        self._tiles = job.tiles  # until the program has run
        self._program.change(
            self._attend,
            _rows(self._kernel, places.keys),
            *job.arguments,
            parts=job.parts,
            is_shared=job.is_shared,
        )
        return True

    def repeat(self, chain: ProgramChain, start: int, others: Sequence[HostPlaces]) -> None:
        """Sets the places of the programs behind this one, which have jobs of the same form.

        Args:
            chain: the programs.
            start: the number of this one, which ``point`` has set.
            others: the places of each other one, as ``are_alike`` demands.
        """
        stop = start + 1 + len(others)
        keys = [places.keys.ctypes.data for places in others]
        values = [places.values.ctypes.data for places in others]
        for number, buffers in zip(self._scatters, (keys, values), strict=True):
            chain.repeat(number, start, stop, (1, buffers))
        chain.repeat(self._attend, start, stop, (1, keys), (2, values))


def of_latents(
    heads: int, latents: NDArray[Any], rotary: NDArray[Any], rows: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The keys and values of multi-head latent attention, for ``attend``.

    Args:
        heads: of the queries, which share one head of ``latents`` and ``rotary`` keys.
        rows: those of the step.

    Returns:
        Views with so many key heads that the kernel supports the query heads of each, and that
        there is work for all threads.
    """
    least = max(-(-heads // MAX_QUERIES), -(-worker_threads.shared.get() // rows))
    parts = next((n for n in range(least, heads) if heads % n == 0), heads)
    keys, values = (
        np.broadcast_to(buffer, (len(buffer), parts, *buffer.shape[2:]))
        for buffer in (rotary, latents)
    )
    return keys, values


def are_alike(one: HostPlaces, other: HostPlaces) -> bool:
    """Whether places are the same but for the buffers."""
    return one.rows is other.rows and all(
        mine.shape == theirs.shape and mine.strides == theirs.strides and mine.dtype == theirs.dtype
        for mine, theirs in ((one.keys, other.keys), (one.values, other.values))
    )


def _rows(kernel: Kernel, keys: NDArray[Any]) -> Function:
    """The function that reads keys and values of this type."""
    return kernel.rows_half if keys.dtype == np.float16 else kernel.rows


class _Attention(NamedTuple):
    """The arguments of ``Run`` for the function ``rows``, and the tiles that it reads."""

    arguments: tuple[int, ...]
    parts: int
    is_shared: bool
    tiles: Tiles


def _job(
    shape: tuple[int, ...],
    keys: NDArray[Any],
    values: NDArray[Any],
    addresses: Sequence[int],
    given: Sequence[int],
    counts: Sequence[int],
    begun: Sequence[int],
    starts: Sequence[int],
) -> _Attention:
    """As ``attend``, for queries of this shape that are multiplied by the scale.

    Args:
        addresses: of the queries, keys, values and the result.
        given: see ``_Given``.
    """
    tokens, heads, line = shape
    rows, key_heads, columns, dim = keys.shape
    assert len(counts) <= rows
    assert sum(counts) == tokens
    assert max(map(add, counts, begun)) <= columns
    assert min(starts) >= 0
    assert max(starts) < columns
    steps = [stride // array.itemsize for array in (keys, values) for stride in array.strides[:3]]
    form = Form(heads // key_heads, key_heads, values.shape[3])
    tiles = tiles_of(tuple(counts), tuple(begun), tuple(starts), form, threading.get_ident())
    return _Attention(
        (
            *(*addresses, tiles.address, *given, heads, key_heads, dim, values.shape[3], columns),
            *(*steps, line - dim),
        ),
        len(tiles.array),
        tiles.seen * key_heads * line >= MIN_SHARED,
        tiles,
    )
