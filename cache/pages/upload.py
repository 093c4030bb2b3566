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
# Buffers of each size: for the running step, the next one, one that is built ahead, and a spare.
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
        """A lazy copy of the first ``size`` numbers; until it is evaluated, they may change."""
        self._copy = self._array[:size] + _ZERO
        return self._copy

    def wait(self) -> None:
        """Waits until the device has copied the numbers."""
        if self._copy is not None:
            mx.eval(self._copy)

    def drop_copy(self) -> None:
        """Forgets the last copy, so that ``wait`` does not evaluate it."""
        self._copy = None


class HostBuffers:
    """Reuses a few buffers of each size in turn: new memory costs host and GPU page faults.

    Args:
        place: called once with each buffer's memory, to let the device read it fast.
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
    """Copies int32 arrays to the device's own memory, all by one operation.

    The CPU makes arrays in memory that it shares with the GPU, which would read each of them from
    there.

    Args:
        parts: the arrays, on the host.
        buffers: the host's memory from which they are copied.

    Attributes:
        arrays: their copies on the device.
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
        """Frees the buffer at once. Do not evaluate what depends on ``arrays`` after that."""
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
