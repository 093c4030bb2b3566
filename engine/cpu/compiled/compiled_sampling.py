"""Choices of tokens from logits, by ``llvm.sampling.choice``; all threads share the lines' parts.

A line has the logits of one row, and the place of a logit is its number in the line. Lines are
float32 and contiguous. Only to be called if ``available``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, run_shared
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function
from chairlift.engine.cpu.compiled.llvm.sampling import choice
from chairlift.engine.cpu.compiled.llvm.sampling.choice import PARTS
from chairlift.engine.cpu.gemm import Floats

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]


def available() -> bool:
    """Whether there is a kernel for this CPU."""
    return choice.compiled() is not None


def part_length(numbers: int) -> int:
    """How many numbers each part of a line has; the last parts may have fewer, or none."""
    return -(-numbers // PARTS)


class Highest(NamedTuple):
    """The first highest number of some lines.

    Attributes:
        places: ``[rows]``.
        values: ``[rows]``; NaN if any number of the line is.
    """

    places: NDArray[np.int32]
    values: Floats


def highest(lines: Floats, rows: Integers) -> Highest:
    """Finds the first highest number of some lines.

    Args:
        lines: ``[lines, numbers]``.
        rows: which lines, ``[rows]``.
    """
    places, values = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
    _run(_kernel().scan, [lines, rows, places, values], [lines.shape[1]], len(rows), lines)
    return Highest(places, values)


def mask(lines: Floats, bits: NDArray[np.int32], into: Floats) -> None:
    """Copies lines, with -inf where their bits are 0.

    Args:
        lines: ``[lines, numbers]``.
        bits: ``[lines, words]``, a bit for each number; see ``sampling.masks``.
        into: ``[lines, numbers]``; may be ``lines``.
    """
    bits = np.ascontiguousarray(bits, np.int32)
    # NOTE: the kernel does not check how much memory it reads and writes.
    assert bits.shape == (len(lines), -(-lines.shape[1] // 32))
    assert into.shape == lines.shape
    sizes = [lines.shape[1], bits.shape[1] * bits.itemsize]
    _run(_kernel().mask, [lines, bits, into], sizes, len(lines), lines)


class Weights:
    """The weights of some lines: ``exp((logit - highest) * rate)``, 0 below ``SMALLEST``.

    Args:
        lines: ``[lines, numbers]``.
        rows: which lines to weigh, ``[rows]``.
        highest: their highest logits, ``[rows]``.
        rates: the inverse of their temperatures, ``[rows]``.
    """

    def __init__(self, lines: Floats, rows: Integers, highest: Floats, rates: Floats) -> None:
        self._lines, self._rows = lines, rows
        self._arrays: list[NDArray[Any]] = [lines, rows, highest, rates]
        self._sizes = [lines.shape[1], part_length(lines.shape[1])]

    def part_sums(self, least: Floats) -> Doubles:
        """The sum of each part's weights that are at least ``least``: ``[rows, PARTS]``.

        Args:
            least: ``[rows]``.
        """
        sums = np.empty((len(self._rows), PARTS), np.float64)
        arrays = [*self._arrays, least, sums]
        _run(_kernel().sum_weights, arrays, self._sizes, sums.size, self._lines)
        return sums

    def weigh(self, index: int, into: Floats) -> None:
        """Computes the weights of the line ``rows[index]``: ``[numbers]``."""
        one = slice(index, index + 1)
        lines, *columns = self._arrays
        arrays = [lines, *(column[one] for column in columns), into]
        _run(_kernel().weigh, arrays, self._sizes, PARTS, into)

    def race(self, least: Floats, parts: Integers, uniform: Floats) -> Integers:
        """Draws a place in one part of each line, with a probability in proportion to its weight.

        Args:
            least: the least weight that can be drawn, ``[rows]``.
            parts: which part of each line, ``[rows]``, from 0 to below ``PARTS``.
            uniform: ``[rows, 1 + part_length]``, from 0 to below 1; the first of a row is not read.

        Returns:
            ``[rows]``, places in the lines; -1 where no weight of the part can be drawn.
        """
        tokens = np.empty(len(self._rows), np.int64)
        arrays = [*self._arrays, least, parts, uniform, tokens]
        _run(_kernel().race, arrays, self._sizes, len(tokens), uniform)
        return tokens


def uniform_numbers(keys: NDArray[np.uint32], count: int) -> Floats:
    """The numbers that ``mx.random.uniform`` gives for each key: ``[keys, count]``.

    Args:
        keys: ``[keys, 2]``.
    """
    keys, numbers = np.ascontiguousarray(keys), np.empty((len(keys), count), np.float32)
    _run(_kernel().uniform, [keys, numbers], [count], len(keys), numbers)
    return numbers


def _kernel() -> choice.SamplingKernel:
    kernel = choice.compiled()
    assert kernel is not None
    return kernel


def _run(
    function: Function, arrays: list[NDArray[Any]], sizes: list[int], parts: int, read: Floats
) -> None:
    """Computes a job now.

    Args:
        function: its arguments are the addresses of ``arrays``, and then ``sizes``.
        parts: of the job.
        read: the largest of the arrays; threads share the job if it is large.
    """
    addresses = (each.ctypes.data for each in arrays)
    run_shared(function, *addresses, *sizes, parts=parts, is_shared=read.size >= MIN_SHARED)
