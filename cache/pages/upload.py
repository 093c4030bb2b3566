"""The upload of a step's numbers to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

# Numbers of the smallest buffer: some whole pages of memory.
MIN_NUMBERS = 1 << 14
# Buffers of a size: of the running step, of the next one, of one that is built ahead, and another.
BUFFERS = 4

_ZERO = mx.array(0, mx.int32)


def numbers_of(tuples: Sequence[Sequence[int]], width: int) -> Numbers:
    """``[tuples, width]``; faster than ``np.array`` for tuples of Python's numbers."""
    flat = chain.from_iterable(tuples)
    return np.fromiter(flat, np.int32, width * len(tuples)).reshape(-1, width)


class HostBuffer:
    """Memory of the host from which numbers are copied to the device.

    Args:
        capacity: int32 numbers.

    Attributes:
        numbers: ``[capacity]``, its memory.
    """

    def __init__(self, capacity: int) -> None:
        self._array = mx.array(np.zeros(capacity, np.int32))
        self.numbers: Numbers = np.array(self._array, copy=False)
        self._copy: mx.array | None = None

    def copied(self, size: int) -> mx.array:
        """Its first numbers on the device, once that is evaluated; until then they may change."""
        self._copy = self._array[:size] + _ZERO
        return self._copy

    def wait(self) -> None:
        """Waits until the device has copied the numbers."""
        if self._copy is not None:
            mx.eval(self._copy)

    def drop_copy(self) -> None:
        """The last copy will never be evaluated."""
        self._copy = None


class HostBuffers:
    """Buffers that are used in turn: new memory costs host and GPU a page fault each.

    Args:
        place: called once with the memory of each, so that the device reads it fast.
    """

    def __init__(self, place: Callable[[Numbers], None] = lambda numbers: None) -> None:
        self._place = place
        self._rings: dict[int, deque[HostBuffer]] = {}

    def take(self, size: int) -> HostBuffer:
        """The buffer with room for ``size`` numbers that was taken the longest time ago."""
        capacity = max(MIN_NUMBERS, 1 << (size - 1).bit_length())
        ring = self._rings.setdefault(capacity, deque())
        if len(ring) < BUFFERS:
            buffer = HostBuffer(capacity)
            self._place(buffer.numbers)
        else:
            buffer = ring.popleft()
            buffer.wait()
        ring.append(buffer)
        return buffer


class Upload:
    """int32 arrays that are copied to the device's own memory, all by one operation.

    The CPU writes arrays in memory that both share; GPUs would read each of them there.

    Args:
        buffers: has the memory for them.

    Attributes:
        arrays: on the device.
    """

    def __init__(self, parts: Sequence[Numbers], buffers: HostBuffers) -> None:
        self._shapes = [part.shape for part in parts]
        ends = np.cumsum([part.size for part in parts]).tolist()
        self._size = ends[-1]
        self._buffer = buffers.take(self._size)
        self._write(parts)
        whole = self._buffer.copied(self._size)
        self.arrays = [
            whole[end - part.size : end].reshape(part.shape)
            for part, end in zip(parts, ends, strict=True)
        ]

    def refill(self, parts: Sequence[Numbers]) -> bool:
        """Replaces the numbers, if those of ``parts`` have the same shapes.

        Nothing that depends on ``arrays`` may have been evaluated.

        Returns:
            Whether they have been replaced. If not, call ``drop``, unless they are still needed.
        """
        if [part.shape for part in parts] != self._shapes:
            return False
        self._write(parts)
        return True

    def drop(self) -> None:
        """Nothing that depends on ``arrays`` will be evaluated."""
        self._buffer.drop_copy()

    def _write(self, parts: Sequence[Numbers]) -> None:
        numbers = self._buffer.numbers[: self._size]
        np.concatenate([part.ravel() for part in parts], out=numbers)


def uploaded(parts: Sequence[Numbers], buffers: HostBuffers) -> Sequence[mx.array]:
    """Copies arrays to the device; see ``Upload``."""
    return Upload(parts, buffers).arrays


def uploaded_words(numbers: NDArray[np.uint32], buffers: HostBuffers) -> mx.array:
    """Copies one array of uint32 to the device; see ``Upload``."""
    (array,) = uploaded([numbers.view(np.int32)], buffers)
    return array.view(mx.uint32)
