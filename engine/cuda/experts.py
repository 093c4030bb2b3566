"""Mixtures of experts on CUDA: the tokens of each expert are multiplied with its weights at once.

A pair is a token and one of its experts. mlx-lm's layers sort the pairs of a step by expert if
there are at least 64, and copy the tokens in that order. MLX's product of sorted pairs takes five
times as long as ``grouped``'s kernel, and MLX 0.32.4 computes it wrong for weights that are not
quantized (seen on an H200 with bfloat16). Its product of unsorted pairs reads an expert's weights
once for each pair. Here kernels read each pair's token where it is, and write the last product
where it belongs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from chairlift.engine.cuda.grouped import (
    FORMS,
    IN_ORDER,
    MAX_LISTED,
    PairRows,
    Weights,
    grouped_product,
    quantize,
)
from chairlift.engine.cuda.tiled import LARGE, SMALL, tile_tokens, tiled_product
from chairlift.engine.model.dequantize import float_type
from chairlift.engine.model.trials.trial import Trial, within_largest

log = logging.getLogger(__name__)

# The fewest unsorted pairs for which the kernel is used. On an H100, an MLP of gpt-oss's shape (32
# experts, mxfp4) took as long as with MLX's products for 16 pairs, and 64 percent of that for 32.
MIN_LISTED = 17
# The fewest pairs that are sorted: as many as mlx-lm's layers sort.
MIN_SORTED = 64
_TRIAL = Trial(
    within_largest(0.02),
    log,
    error="no CUDA kernel for experts: %s",
    level=logging.WARNING,
    mismatch="the CUDA kernel for experts is wrong on this device; it is not used",
)


class ExpertProduct:
    """The product of tokens with the weights of a layer.

    Attributes:
        dtype: the type of tokens and products.

    Args:
        tiles: whether ``tiled``'s kernel works.
    """

    def __init__(self, weights: Weights, tiles: bool = True) -> None:
        self._weights = weights
        self._tiles = tiles
        self.dtype = weights.dtype

    def __call__(self, x: mx.array, indices: mx.array, are_sorted: bool) -> mx.array | None:
        """Multiplies each token with the weights of its experts.

        Args:
            x: tokens as mlx-lm's layers have them: if sorted, ``[pairs, 1, inputs]``, else
                ``[..., 1 or experts of a token, 1, inputs]``.
            indices: the experts, ``[pairs]`` or ``[..., experts of a token]``.

        Returns:
            ``[*indices.shape, 1, outputs]``; None if the kernel does not take these tokens.
        """
        if x.dtype != self._weights.dtype or x.ndim != indices.ndim + 2 or x.shape[-2] != 1:
            return None
        if are_sorted:
            fits = x.shape[:-2] == indices.shape and indices.size > 0
        else:
            alike = x.shape[:-2] in (indices.shape, (*indices.shape[:-1], 1))
            fits = alike and MIN_LISTED <= indices.size <= MAX_LISTED
        if not fits:
            return None
        flat, own = x.reshape(-1, x.shape[-1]), indices.reshape(-1)
        if are_sorted:
            y = self.of_sorted(flat, own)
        else:
            y = grouped_product(flat, own, self._weights, listed=True)
        return y.reshape(*indices.shape, 1, -1)

    def of_sorted(self, x: mx.array, experts: mx.array, rows: PairRows = IN_ORDER) -> mx.array:
        """Multiplies tokens ``[tokens, inputs]`` with their experts' weights: ``[pairs, outputs]``.

        Args:
            experts: ``[pairs]``, ascending.
            rows: of each pair.
        """
        tokens = tile_tokens(len(experts), self._weights) if self._tiles else None
        if tokens is None:
            return grouped_product(x, experts, self._weights, rows)
        return tiled_product(x, experts, self._weights, tokens, rows)


class GroupedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """A layer with an ``own_product``."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        y = self.own_product(x, indices, sorted_indices)
        # NOTE: not as sorted, which MLX computes wrong.
        return super().__call__(x, indices) if y is None else y


class GroupedQuantizedSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A quantized layer with an ``own_product``."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        y = self.own_product(x, indices, sorted_indices)
        return super().__call__(x, indices, sorted_indices) if y is None else y


class UnsortedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """A layer whose tokens are computed in any order."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        return super().__call__(x, indices)


class GroupedSwitchGLU(SwitchGLU):  # type: ignore[misc]
    """An MLP of experts whose three layers have an ``own_product``."""

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        up, gate, down = (
            layer.own_product for layer in (self.up_proj, self.gate_proj, self.down_proj)
        )
        if indices.size < MIN_SORTED or any(x.dtype != each.dtype for each in (up, gate, down)):
            return super().__call__(x, indices)
        own = indices.flatten()
        order = mx.argsort(own)
        experts, tokens = own[order], x.reshape(-1, x.shape[-1])
        read = PairRows(read=order // indices.shape[-1])
        mixed = self.activation(
            *(each.of_sorted(tokens, experts, read)[:, None] for each in (up, gate))
        )
        if mixed.dtype != down.dtype:
            return super().__call__(x, indices)
        y = down.of_sorted(mixed[:, 0], experts, PairRows(written=order))
        return y.reshape(*indices.shape, -1)


def install(model: Any) -> None:
    """Replaces mlx-lm's layers of experts, and the MLPs that consist of them."""
    replaced, dtype = 0, float_type(model)
    mlps = []
    for module in model.modules():
        if type(module) is SwitchGLU:
            mlps.append(module)
        if type(module) not in (SwitchLinear, QuantizedSwitchLinear):
            continue
        product = _product_of(module, dtype)
        plain = type(module) is SwitchLinear
        if product is not None:
            module.own_product = product
            module.__class__ = GroupedSwitchLinear if plain else GroupedQuantizedSwitchLinear
            replaced += 1
        elif plain:
            module.__class__ = UnsortedSwitchLinear
    for mlp in mlps:
        layers = mlp.up_proj, mlp.gate_proj, mlp.down_proj
        if all(hasattr(layer, "own_product") for layer in layers):
            mlp.__class__ = GroupedSwitchGLU
    if replaced:
        log.info("layers of experts with one product for all: %d", replaced)


def _product_of(layer: Any, dtype: mx.Dtype) -> ExpertProduct | None:
    """The product of a layer of experts; None if there is no kernel for it."""
    weights = weights_of(layer, dtype)
    if weights is None or not weights.are_fit:
        return None
    form = weights.bits, weights.group, weights.mode, weights.dtype, weights.bias is not None
    return ExpertProduct(weights, tiles_work(*form)) if kernel_works(*form) else None


def weights_of(layer: Any, dtype: mx.Dtype) -> Weights | None:
    """The weights of a layer of experts; None if each expert has a scale of its own (nvfp4).

    ``dtype`` is the model's type.
    """
    bias = layer.get("bias")
    if type(layer) is SwitchLinear:
        return Weights(layer.weight, bias=bias)
    if layer.get("global_scale") is not None:
        return None
    arrays = layer.weight, layer.scales, layer.get("biases")
    own = None if layer.mode == "affine" else dtype
    # A layer need not name the bits and the group that its mode has.
    bits, group = FORMS.get(layer.mode, (layer.bits, layer.group_size))
    return Weights(*arrays, bits, group, bias, layer.mode, own)


@functools.cache
def kernel_works(bits: int, group: int, mode: str, dtype: mx.Dtype, biased: bool) -> bool:
    """Whether the kernel computes what a product for each token does, with such weights."""
    order = [3, 0, 4, 3, 2, 4]
    pairs = [(n // 2, e) for n, e in enumerate(order)]

    def ours(x: mx.array, experts: mx.array, weights: Weights, rows: PairRows) -> mx.array:
        few = grouped_product(x[:3], mx.array(order, mx.uint32), weights, listed=True)
        return mx.concatenate([grouped_product(x, experts, weights, rows), few])

    return _works(bits, group, mode, dtype, biased, ours, pairs)


@functools.cache
def tiles_work(bits: int, group: int, mode: str, dtype: mx.Dtype, biased: bool) -> bool:
    """The same, for tiles of each size."""

    def products(
        tokens: int, x: mx.array, experts: mx.array, weights: Weights, rows: PairRows
    ) -> mx.array:
        return tiled_product(x, experts, weights, tokens, rows)

    form = bits, group, mode, dtype, biased
    return all(_works(*form, functools.partial(products, size)) for size in (SMALL, LARGE))


def _works(
    bits: int,
    group: int,
    mode: str,
    dtype: mx.Dtype,
    biased: bool,
    ours: Callable[[mx.array, mx.array, Weights, PairRows], mx.array],
    more: Sequence[tuple[int, int]] = (),
) -> bool:
    """Whether a product of tokens with such weights is that of each token with its expert's.

    Args:
        ours: the product for tokens, the sorted pairs' experts, weights, and the pairs' rows.
        more: further pairs of a token and an expert that it computes after these.
    """
    if not hasattr(mx, "cuda") or not mx.cuda.is_available():
        return False
    experts, outputs, inputs, tokens = 5, 64, 1024, 150
    keys = mx.random.split(mx.random.key(bits), 4)
    weight = mx.random.normal((experts, outputs, inputs), dtype, key=keys[0])
    bias = mx.random.normal((experts, outputs), dtype, key=keys[1]) if biased else None
    # No token has expert 1, and expert 3 has the most.
    own = [0] + [2] * 9 + [3] * 100 + [4] * (tokens - 110)
    x = mx.random.normal((tokens, inputs), dtype, scale=0.02, key=keys[2])
    weights, plain = Weights(weight, bias=bias), weight
    if bits:
        weights, plain = quantize(weight, bits, group, mode, bias)
    # Pair n has row 7 * n, which are all rows because 7 and 150 have no common divisor.
    rows = [7 * n % tokens for n in range(tokens)]
    places = mx.array(rows, mx.uint32)

    def expected() -> mx.array:
        expert_of = dict(zip(rows, own, strict=True))
        pairs = [*((n, expert_of[n]) for n in range(tokens)), *more]
        products = mx.stack([x[n] @ plain[e].T for n, e in pairs])
        return products if bias is None else products + bias[mx.array([e for _, e in pairs])]

    return _TRIAL.passes(
        expected, lambda: ours(x, mx.array(own, mx.uint32), weights, PairRows(places, places))
    )
