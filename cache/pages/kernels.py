"""The operations on pages that a device has to provide."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from chairlift.cache.pages.step import ChunkPlace, KindStep, StepSizes, TileTable
from chairlift.cache.pages.upload import Numbers
from chairlift.cache.quantized import Quantization


class KeysValues(NamedTuple):
    """Keys and values of the same type, and mostly of the same shape.

    Those of a step's tokens are ``[tokens, key heads, 1, dim]``; a layer's pages are
    ``[pages, key heads, PAGE_TOKENS, dim]``, contiguous, and kernels write to them in place.
    Quantized pages are ``[pages, key heads, PAGE_TOKENS, packed]``; see ``Quantization.pack``.
    """

    keys: mx.array
    values: mx.array


class Scoring(NamedTuple):
    """The parameters of attention's scores, besides queries and keys.

    Attributes:
        scale: their factor.
        window: the number of tokens that a query sees, its own included; None: all.
        sinks: ``[heads]``, a score of each head that takes weight but adds no value; or None.
        softcap: a score ``s`` becomes ``softcap * tanh(s / softcap)``; None: it stays.
    """

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    softcap: float | None = None


class PageKernels(Protocol):
    """Kernels that read pages, and write them in place, which MLX does not see.

    Their reads and writes happen in the order in which they are dispatched.
    """

    def attend(
        self,
        queries: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scoring: Scoring,
        quantization: Quantization | None,
    ) -> mx.array:
        """Attention of a step's tokens; also writes their keys and values to their pages.

        Quantized, the tokens of the step are rounded before any of them is read. So a token has the
        same result whichever tokens come with it in a step.

        Args:
            queries: ``[tokens, heads, 1, dim]``.
            new: the tokens' keys and values, ``[tokens, key heads, 1, dim]``. Values may have
                another dimension.
            quantization: that of the pages; None if they have the type of the keys.

        Returns:
            ``[tokens, heads, 1, value dim]``.

        Raises:
            ValueError: there is no kernel for these shapes or types.
        """
        ...

    def attend_latent(
        self,
        queries: mx.array,
        rotary: mx.array,
        new: KeysValues,
        buffers: KeysValues,
        step: KindStep,
        scale: float,
    ) -> mx.array:
        """Multi-head latent attention of a step's tokens; also writes them to their pages.

        A score is ``scale * (query x latent) + rotary query x rotary key``; the values are the
        latents.

        Args:
            queries: ``[tokens, heads, 1, latent]``.
            rotary: ``[tokens, heads, 1, rotary]``, the queries of the rotary part, times the scale.
            new: the tokens' latents ``[tokens, 1, 1, latent]`` and rotary keys.

        Returns:
            ``[tokens, heads, 1, latent]``.

        Raises:
            ValueError: there is no kernel for these shapes or types.
        """
        ...

    def tile_table(
        self, chunks: Sequence[ChunkPlace], sizes: StepSizes, form: Hashable
    ) -> TileTable:
        """Makes the tiles of a step with chunks, for the layers of a form that ``attend`` used."""
        ...

    def place(self, numbers: Numbers) -> None:
        """Puts memory of an array where the device reads fast what the host writes again."""
        ...

    def put(self, buffers: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
        """Writes tokens to pages.

        Args:
            new: ``[1, key heads, tokens, dim]``, in the form of the pages. Keys and values may have
                different heads and dims.
            slots: ``[tokens]`` int32, ``page number * PAGE_TOKENS + slot`` of each token.

        Returns:
            An array that is ready once the tokens are written.
        """
        ...

    def copy(self, buffers: KeysValues, pairs: mx.array) -> mx.array:
        """Copies pages.

        Args:
            pairs: ``[copies, 2]`` int32, the page to read and the page to write; none is both.

        Returns:
            An array that is ready once the pages are written.
        """
        ...
