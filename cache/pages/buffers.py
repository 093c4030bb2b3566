"""The memory of one attention layer's pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from chairlift.cache.pages.kernels import KeysValues, PageKernels
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.pool import Page, PagePool
from chairlift.cache.quantized import Quantization
from chairlift.cache.snapshot import KVPiece


class LayerPages:
    """The buffers of one layer, which are allocated when it is first written to.

    Attributes:
        pool: the pages of all layers of this kind.
        kernels: read and write the buffers.
        quantization: that of the buffers; None: they have the type of the model's keys.
        buffers: None before the first write.
    """

    def __init__(
        self, pool: PagePool, kernels: PageKernels, quantization: Quantization | None = None
    ) -> None:
        self.pool = pool
        self.kernels = kernels
        self.quantization = quantization
        self.buffers: KeysValues | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 before the first write."""
        if self.buffers is None:
            return 0
        return sum(array.nbytes for array in self.buffers) // (self.pool.pages + 1)

    def buffers_for(self, new: KeysValues) -> KeysValues:
        """The buffers for the model's keys and values, ``[tokens, key heads, 1, dim]``.

        Raises:
            ValueError: they cannot be quantized.
        """
        if self.buffers is not None:
            return self.buffers
        if self.quantization is None:
            return self._allocated(new)
        # Never evaluated: only the shape and the type matter.
        return self._allocated(KeysValues(*map(self.quantization.pack, new)))

    def _allocated(self, stored: KeysValues) -> KeysValues:
        """The buffers, allocated if need be for ``[.., key heads, .., dim]`` in their form."""
        if self.buffers is None:
            self.buffers = KeysValues(*(_zeros(self.pool.pages + 1, like) for like in stored))
            # Allocated at once: a lazy array would be a new one for each step that is compiled.
            mx.eval(*self.buffers)
            self.pool.copies.layers.append(partial(self.kernels.copy, self.buffers))
        return self.buffers

    def get(self, pages: Sequence[Page], first: int, tokens: int) -> KVPiece:
        """Copies ``tokens`` tokens from slot ``first`` of the first of ``pages`` on.

        The copy is lazy: evaluate it before these pages may be written. It has no heads if the
        model has never written to this layer.
        """
        self.pool.copies.dispatch()
        if self.buffers is None:
            empty = mx.zeros((1, 0, tokens, 0))
            return KVPiece(empty, empty)
        numbers = mx.array([page.number for page in pages], mx.int32)
        return KVPiece(*(_gathered(array, numbers, first, tokens) for array in self.buffers))

    def put(self, pages: Sequence[Page], first: int, piece: KVPiece) -> list[mx.array]:
        """Writes a piece, in the form of the buffers, from slot ``first`` of ``pages[0]`` on.

        Returns:
            Arrays that are ready once the tokens are written.
        """
        if not piece.keys.shape[1]:
            return []
        self.pool.copies.dispatch()
        new = KeysValues(piece.keys, piece.values)
        buffers = self._allocated(new)
        numbers = np.array([page.number for page in pages], np.int32)
        slots = (numbers[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS, dtype=np.int32)).ravel()
        return [self.kernels.put(buffers, new, mx.array(slots[first : first + piece.tokens]))]


def _zeros(pages: int, like: mx.array) -> mx.array:
    return mx.zeros((pages, like.shape[1], PAGE_TOKENS, like.shape[3]), like.dtype)


def _gathered(buffer: mx.array, numbers: mx.array, first: int, tokens: int) -> mx.array:
    """Tokens of some pages as ``[1, key heads, tokens, dim]``."""
    _, heads, _, dim = buffer.shape
    pages = mx.take(buffer, numbers, axis=0).swapaxes(0, 1).reshape(1, heads, -1, dim)
    return pages[:, :, first : first + tokens]
