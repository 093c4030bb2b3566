"""Multi-head latent attention over pages.

mlx-lm's model files cache a latent and a rotary key for each token, in place of keys and values.
They multiply the rotary queries with the rotary keys themselves, and pass the products to the
attention function as a mask. Here they multiply them with an identity matrix instead, so what they
pass are the rotary queries, and a kernel computes all scores from the pages.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from chairlift.cache.pages.buffers import LayerPages
from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.step import KindStep


class LatentLayer:
    """One layer in one step, behind mlx-lm's cache protocol.

    Args:
        memory: that of the pages.
        kind: the step's arrays for such layers.
        traced: the step is being compiled.
        pages: the layer's.
        buffers: replace those of the pages, in a step that is being compiled.

    Attributes:
        offset: ``[tokens]`` int32, the position of each token.
        max_size: None, as for full attention.
    """

    max_size = None

    def __init__(
        self,
        memory: PagedMemory,
        kind: KindStep,
        traced: bool,
        pages: LayerPages,
        buffers: KeysValues | None,
    ) -> None:
        self._memory = memory
        self._kind = kind
        self._traced = traced
        self._pages = pages
        self._buffers = buffers
        self._new: KeysValues | None = None
        self.offset = kind.tokens.arrays.offset

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> None:
        """No mask: the kernel knows what each token sees.

        Raises:
            ValueError: more than one new token a row, or a sliding window.
        """
        if n != 1 or window_size is not None or self._pages.pool.window is not None:
            raise ValueError("no latent attention with a window, or with several tokens of a row")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes the latents and rotary keys of the step's tokens.

        Args:
            keys: ``[tokens, 1, 1, latent]``.
            values: ``[tokens, 1, 1, rotary]``.

        Returns:
            The latents, and an identity matrix ``[rotary, rotary]``.

        Raises:
            ValueError: these are not one latent and one rotary key for each token.
        """
        rotary = values.shape[3]
        forms = {array.shape[:3] for array in (keys, values)}
        if forms != {(self.offset.size, 1, 1)} or not rotary:
            raise ValueError(f"no latents and rotary keys: {keys.shape}, {values.shape}")
        self._new = KeysValues(keys, values)
        return keys, _identity(rotary, values.dtype)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, rotary: mx.array, scale: float
    ) -> mx.array:
        """Attention of the step's tokens; see ``kernels.PageKernels.attend_latent``.

        Args:
            keys, values: what the model passes as such; both have to be the latents.

        Raises:
            ValueError: they are not, or there is no kernel.
        """
        new, pages = self._new, self._pages
        if new is None or keys is not new.keys or values is not keys:
            raise ValueError("keys and values are no latents")
        if pages.quantization is not None:
            raise ValueError("there is no kernel for quantized latents")
        buffers = self._buffers or pages.buffers_for(new)
        if not self._traced:
            # See ``PagedLayer.attend``.
            mx.async_eval(queries, rotary, *new)
        mixed = pages.kernels.attend_latent(queries, rotary, new, buffers, self._kind, scale)
        self._memory.effects = [mixed]
        return mixed


@functools.cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    matrix = mx.eye(size, dtype=dtype)
    mx.eval(matrix)
    return matrix
