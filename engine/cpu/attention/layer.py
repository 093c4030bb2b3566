"""An attention layer of few tokens in NumPy and compiled functions, from input to output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.layer import LayerCache, Mask
from chairlift.cache.packed.split import PackedMask
from chairlift.cache.packed.step import PackedLayer, attend_on_host
from chairlift.engine.cpu.attention.blocks import attended
from chairlift.engine.cpu.compiled import row_attention
from chairlift.engine.cpu.compiled.row_attention import AttentionJobs
from chairlift.engine.cpu.elementwise import HostNorm
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.host_linear import Products
from chairlift.engine.cpu.matrix import apart
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")

# A layer's cache in a step of one token a row, or of rows, drafts and prompts packed together.
DecodeCache = LayerCache | PackedLayer
DecodeMask = mx.array | PackedMask | None


class Projected(NamedTuple):
    """Arrays of a program that computes an attention layer's queries, keys and values.

    Attributes:
        cosines, sines: ``[tokens, dim / 2]``, read by the program.
        queries, keys, values: ``[tokens, heads, dim]``, written by it.
    """

    cosines: Floats
    sines: Floats
    queries: Floats
    keys: Floats
    values: Floats


class RowScores:
    """See ``HostAttend``.

    Args:
        scale: factor of the scores.
        sinks, softcap: see ``attended``.
    """

    def __init__(
        self, scale: float, sinks: Floats | None = None, softcap: float | None = None
    ) -> None:
        self._scale, self._sinks, self._softcap = scale, sinks, softcap

    def by_row(
        self,
        queries: Floats,
        keys: mx.array,
        values: mx.array,
        counts: Sequence[int],
        seen: Sequence[tuple[int, int]],
    ) -> Floats | None:
        """See ``HostAttend``."""
        stored = view(keys), view(values)
        if not row_attention.supports(queries, *stored):
            return None
        begun, starts = zip(*seen, strict=True)
        return row_attention.attend(
            *(queries, *stored, counts, begun, self._scale, starts),
            sinks=self._sinks,
            softcap=self._softcap,
        )

    def masked(self, queries: Floats, keys: mx.array, values: mx.array, mask: Mask) -> Floats:
        """See ``HostAttend``."""
        rows, heads, step, dim = queries.shape
        mx.eval(keys, values, mask if isinstance(mask, mx.array) else [])
        grouped = queries.reshape(rows, keys.shape[1], -1, dim)
        mixed = attended(
            *(grouped, keys, values, mask, step, self._scale),
            sinks=self._sinks,
            softcap=self._softcap,
        )
        return mixed.reshape(rows, heads, step, -1)


class LatentScores:
    """See ``HostAttend``, for multi-head latent attention.

    The cache has latents, which are also the values, as keys, and rotary keys in place of values.
    Queries are those for rotary keys and, behind them, those for latents, multiplied by the scale.
    """

    def by_row(
        self,
        queries: Floats,
        keys: mx.array,
        values: mx.array,
        counts: Sequence[int],
        seen: Sequence[tuple[int, int]],
    ) -> Floats | None:
        """See ``HostAttend``."""
        heads, cached = queries.shape[1], (view(keys), view(values))
        stored = row_attention.of_latents(heads, *cached, len(counts))
        if not row_attention.supports(queries, *stored):
            return None
        begun, starts = zip(*seen, strict=True)
        return row_attention.attend(queries, *stored, counts, begun, 1.0, starts)

    def masked(self, queries: Floats, keys: mx.array, values: mx.array, mask: Mask) -> Floats:
        """See ``HostAttend``."""
        both = mx.concatenate([values, keys], axis=-1)
        return RowScores(1.0).masked(queries, both, keys, mask)


class HostAttention:
    """An attention layer's decode step.

    Attributes:
        products: its products.
        angle_settings: layers with the same have the same ``angles``; see ``SharedRope.settings``.

    Args:
        layer: its projections have host products, those of queries, keys and values in one group.
            The projections may have biases, and each head's queries and keys a norm.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._products: Products = layer.q_proj.products
        self._output: Products = layer.o_proj.products
        self._dim: int = layer.rope.dims
        self.angle_settings: int = layer.rope.settings
        self._norms = [HostNorm(layer[name], self._dim) for name in NORMS if name in layer]
        projections = [layer[name] for name in PROJECTIONS]
        biases = [
            view(each.bias) if "bias" in each else np.zeros(len(each.weight), np.float32)
            for each in projections
        ]
        self._bias = np.concatenate(biases[:3]) if any(map(np.any, biases[:3])) else None
        self._output_bias = biases[3] if biases[3].any() else None
        self._scores = RowScores(layer.scale)
        self.products = self._products, self._output

    def __call__(self, x: Floats, mask: DecodeMask, cache: DecodeCache) -> Floats:
        """See ``HostDecode``."""
        rows, dim = len(x), self._dim
        product = self._products(x)
        if self._bias is not None:
            product += self._bias
        queries, _, values = apart(product, self._products.matrix.stops)
        heads, key_heads = queries.shape[1] // dim, values.shape[1] // dim
        queries_keys = product[:, : (heads + key_heads) * dim].reshape(rows, -1, dim)
        if self._norms:
            split = queries_keys[:, :heads], queries_keys[:, heads:]
            normed = [norm(part) for norm, part in zip(self._norms, split, strict=True)]
            queries_keys = np.concatenate(normed, axis=1)
        rotated = self._layer.rope.rotate(queries_keys, cache.offset)
        arrays = rotated[:, :heads], rotated[:, heads:], values.reshape(rows, key_heads, dim)
        mixed = self.attend(*arrays, mask, cache)
        result = self._output(mixed.reshape(rows, -1))
        if self._output_bias is not None:
            result += self._output_bias
        return result

    def angles(self, cache: DecodeCache) -> tuple[Floats, Floats]:
        """The cosines and sines of a step's tokens; see ``SharedRope.host_table``."""
        angles: tuple[Floats, Floats] = self._layer.rope.host_table(cache.offset)
        return angles

    def attend(
        self, queries: Floats, keys: Floats, values: Floats, mask: DecodeMask, cache: DecodeCache
    ) -> Floats:
        """Writes the keys and values to the cache; attention of ``[tokens, heads, dim]``."""
        if isinstance(cache, PackedLayer):
            assert isinstance(mask, PackedMask)
            return cache.attend_on_host(queries, keys, values, mask, self._scores)
        assert not isinstance(mask, PackedMask)
        return attend_on_host(cache, queries, keys, values, mask, self._scores)

    def build_before(self, build: ProgramBuilder, x: Floats) -> Projected:
        """Adds what is computed before attention, without the products' additions.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        tokens, dim = len(x), self._dim
        product = self._products.build(build, "projected", x)
        if self._bias is not None:
            build.sum(product, self._bias, product)
        queries, keys, values = (
            part.reshape(tokens, -1, dim) for part in apart(product, self._products.matrix.stops)
        )
        for norm, part in zip(self._norms, (queries, keys), strict=False):
            norm.build(build, part, part)
        heads = queries.shape[1]
        both = product[:, : self._products.matrix.stops[2]].reshape(tokens, -1, dim)
        cosines, sines = (
            build.array(f"{name} {self.angle_settings}", tokens, dim // 2)
            for name in ("cosines", "sines")
        )
        rotated = build.rotated("rotated", both, cosines, sines)
        return Projected(cosines, sines, rotated[:, :heads], rotated[:, heads:], values)

    def build_attention(
        self, build: ProgramBuilder, projected: Projected, mixed: Floats
    ) -> AttentionJobs:
        """Adds attention to a cache's columns.

        Raises:
            NoProgramError: there is no kernel for such heads.
        """
        scaled = build.array("scaled", *projected.queries.shape)
        arrays = projected.queries, projected.keys, projected.values, scaled, mixed
        return AttentionJobs(build.program, *arrays, self._layer.scale)

    def build_after(self, build: ProgramBuilder, mixed: Floats) -> Floats:
        """Adds what is computed after attention, without the product's addition.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        result = self._output.build(build, "output", mixed)
        if self._output_bias is not None:
            build.sum(result, self._output_bias, result)
        return result
