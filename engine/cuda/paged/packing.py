"""A CUDA kernel that quantizes a step's keys and values: into pages, and rounded for the step.

A row of a page, one token of one key head, is that of ``Quantization.pack``: codes of 8 or 4 bits,
then the scales, then the biases of its groups. A number is ``scale * code + bias``.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.quantized import Quantization
from chairlift.engine.cuda.source import included


def pack(
    new: KeysValues,
    pool: KeysValues,
    pages: mx.array,
    owners: mx.array,
    stops: mx.array,
    quantization: Quantization,
) -> KeysValues:
    """Quantizes tokens into the pool.

    Args:
        new: ``[tokens, key heads, 1, dim]``; the quantization's group divides ``dim``.
        pool: ``[pages, key heads, PAGE_TOKENS, packed]`` uint32, contiguous.
        pages: ``[entries]`` int32, a ``page_table`` of the sequences.
        owners: ``[tokens]`` int32, each token's line of ``pages``.
        stops: ``[tokens]`` int32, each token's position plus one.

    Returns:
        The tokens as attention reads them from the pool, in the shape and type of ``new``.
    """
    tokens, key_heads, _, dim = new.keys.shape
    results = _kernel()(
        inputs=[*new, *pool, pages, owners, stops],
        template=[
            ("T", new.keys.dtype),
            ("DIM", dim),
            ("PAGE", PAGE_TOKENS),
            *template_of(quantization),
        ],
        grid=(64, key_heads, tokens),
        threadgroup=(64, 1, 1),
        output_shapes=[new.keys.shape] * 2,
        output_dtypes=[new.keys.dtype] * 2,
    )
    return KeysValues(*results)


def template_of(quantization: Quantization | None) -> list[tuple[str, int]]:
    """The template arguments GROUP and BITS of a kernel over pages."""
    if quantization is None:
        return [("GROUP", 0), ("BITS", 0)]
    return [("GROUP", quantization.group), ("BITS", quantization.bits)]


def packed_words(dim: int, dtype: mx.Dtype, quantization: Quantization) -> int:
    """The numbers, uint32, of a packed row of ``dim`` numbers of a type."""
    scale_bytes = 2 * dim // quantization.group * dtype.size  # and biases
    return dim * quantization.bits // 32 + scale_bytes // mx.uint32.size


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_pages_pack",
        input_names=["new_keys", "new_values", "keys", "values", "pages", "owners", "stops"],
        output_names=["rounded_keys", "rounded_values"],
        header=included("ptx", "packed_rows"),
        source=included("pack"),
    )
