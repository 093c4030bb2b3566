"""The upload of a step's numbers to the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

_ZERO = mx.array(0, mx.int32)


class Upload:
    """int32 arrays that are copied to the device's own memory, all by one operation.

    The CPU writes arrays in memory that both share; GPUs would read each of them there.

    Attributes:
        arrays: on the device.
    """

    def __init__(self, parts: Sequence[Numbers]) -> None:
        self._shapes = [part.shape for part in parts]
        self._host = mx.array(np.concatenate([part.ravel() for part in parts]))
        whole = self._host + _ZERO
        ends = np.cumsum([part.size for part in parts]).tolist()
        self.arrays = [
            whole[end - part.size : end].reshape(part.shape)
            for part, end in zip(parts, ends, strict=True)
        ]

    def refill(self, parts: Sequence[Numbers]) -> bool:
        """Replaces the numbers, if those of ``parts`` have the same shapes.

        Nothing that depends on ``arrays`` may have been evaluated.

        Returns:
            Whether they have been replaced.
        """
        if [part.shape for part in parts] != self._shapes:
            return False
        shared = np.array(self._host, copy=False)
        np.concatenate([part.ravel() for part in parts], out=shared)
        return True


def uploaded(parts: Sequence[Numbers]) -> Sequence[mx.array]:
    """Copies arrays to the device; see ``Upload``."""
    return Upload(parts).arrays
