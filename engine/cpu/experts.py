"""Mixtures of experts on the CPU: an expert's tokens are multiplied with its weights at once.

MLX multiplies one pair of a token and an expert after the other, so it reads an expert's weights
once for each of its tokens. Layers evaluate their input while the graph is built, so such a model
is eager; see ``kernels``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear
from numpy.typing import NDArray

from chairlift.engine.cpu import elementwise
from chairlift.engine.cpu.compiled import compiled_experts
from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts, GroupsJob
from chairlift.engine.cpu.compiled.quantized_matmul import panel_bytes, quantized_experts
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view
from chairlift.engine.device import memory
from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.model.recorder import record

log = logging.getLogger(__name__)

# Share of the free memory that the copies of weights may take. If the copies of quantized weights
# take more, the weights are released once they are copied, and then they count as free.
SHARE = 0.5
# The arrays of a quantized weight.
_ARRAYS = ("weight", "scales", "biases")


class Routes(NamedTuple):
    """The experts of pairs of a token and an expert.

    Attributes:
        order: ``[pairs]``: the pairs by expert.
        groups: ``[groups, 3]``: see ``CompiledExperts``.
    """

    order: NDArray[np.intp]
    groups: NDArray[np.int64]


class ExpertRouter:
    """Finds the routes of a layer's tokens once for all products with the same indices."""

    def __init__(self) -> None:
        self._indices: mx.array | None = None
        self._routes = Routes(np.empty(0, np.intp), np.empty((0, 3), np.int64))

    def __call__(self, indices: mx.array) -> Routes:
        """The routes of pairs, whose experts are ``indices``, of any shape."""
        if self._indices is not indices:
            self._indices, self._routes = indices, routes_of(view(indices).reshape(-1))
        return self._routes


def routes_of(experts: NDArray[Any]) -> Routes:
    """The routes of pairs with these experts, ``[pairs]``."""
    order = np.argsort(experts, kind="stable")
    by_expert = experts[order].astype(np.int64)
    starts = np.flatnonzero(np.diff(by_expert, prepend=-1))
    counts = np.diff(starts, append=len(order))
    return Routes(order, np.stack([by_expert[starts], starts, counts], axis=1))


class Experts(NamedTuple):
    """A ``HostCall``: a layer of experts, of tokens and the indices of their experts."""

    layer: Any


class _HostExperts:
    """A layer with ``experts``, their weights, and a ``router``."""

    experts: CompiledExperts
    router: ExpertRouter

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.experts.count

    def __call__(
        self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """``[..., 1, inputs]`` and ``[..., chosen]`` → ``[..., chosen, 1, outputs]``.

        The leading axes of ``x`` are those of ``indices``; a token that all of its experts share
        has 1 in place of ``chosen``.
        """
        call = Experts(self)
        shape = *indices.shape, 1, self.experts.outputs
        if (stand_in := record(call, [x, indices], shape)) is not None:
            return stand_in
        shared = x.shape[:-2] == (*indices.shape[:-1], 1)
        fits = x.shape[-2] == 1 and (shared or x.shape[:-2] == indices.shape)
        if not fits or not _takes(x, self):
            if not self.weight.size:
                raise ValueError(f"no experts for tokens {x.shape} and indices {indices.shape}")
            base: Any = super()
            result: mx.array = base.__call__(x, indices, sorted_indices)
            return result
        tokens = view(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        by_expert = self.of_tokens(tokens, self.router(indices))
        product = mx.array(by_expert).reshape([*indices.shape, 1, by_expert.shape[1]])
        product = product.astype(x.dtype)
        return product + mx.expand_dims(self.bias[indices], -2) if "bias" in self else product

    def build(
        self, build: ProgramBuilder, name: str, x: Floats, groups: NDArray[np.int64]
    ) -> tuple[Floats, list[GroupsJob]]:
        """As ``of_tokens``, by jobs, for pairs in the order of their experts.

        Args:
            name: the beginning of the names of arrays.
            x, groups: see ``CompiledExperts.build``.

        Returns:
            ``[pairs, outputs]``, and the jobs whose groups have to be set.
        """
        product, job = build.experts(f"{name}experts", self.experts, x, groups)
        return product, [job]

    def of_tokens(self, x: Floats, routes: Routes) -> Floats:
        """Multiplies tokens, without the bias.

        Args:
            x: ``[tokens or pairs, inputs]``.

        Returns:
            ``[pairs, outputs]``.
        """
        order, groups = routes
        return _in_order(self.experts(x[order // _share(x, order)], groups), order)


class HostSwitchLinear(_HostExperts, SwitchLinear):  # type: ignore[misc]
    """A ``SwitchLinear`` on the CPU."""


class HostQuantizedSwitchLinear(_HostExperts, QuantizedSwitchLinear):  # type: ignore[misc]
    """A ``QuantizedSwitchLinear`` on the CPU."""


_HOST = {SwitchLinear: HostSwitchLinear, QuantizedSwitchLinear: HostQuantizedSwitchLinear}


class HostSwitchGLU(SwitchGLU):  # type: ignore[misc]
    """A gated MLP of experts that computes without MLX between its products.

    Attributes:
        wide: the weights of the gate, and behind them those of the other layer with its input.
        narrow: those of the last layer.
    """

    wide: CompiledExperts
    narrow: CompiledExperts
    router: ExpertRouter

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.wide.count

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """``[..., inputs]`` and ``[..., chosen]`` → ``[..., chosen, outputs]``."""
        shape = *indices.shape, self.narrow.outputs
        if (stand_in := record(Experts(self), [x, indices], shape)) is not None:
            return stand_in
        if not _takes(x, self.up_proj):
            result: mx.array = super().__call__(x, indices)
            return result
        tokens = view(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        by_expert = self.of_tokens(tokens, self.router(indices))
        return mx.array(by_expert).reshape([*indices.shape, by_expert.shape[1]]).astype(x.dtype)

    def build(
        self, build: ProgramBuilder, name: str, x: Floats, groups: NDArray[np.int64]
    ) -> tuple[Floats, list[GroupsJob]]:
        """See ``HostSwitchLinear``.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        wide, first = build.experts(f"{name}wide", self.wide, x, groups)
        middle = wide.shape[1] // 2
        gated = build.gated("swiglu", f"{name}gated", wide[:, :middle], wide[:, middle:])
        product, second = build.experts(f"{name}narrow", self.narrow, gated, groups)
        return product, [first, second]

    def of_tokens(self, x: Floats, routes: Routes) -> Floats:
        """``[tokens, inputs]`` → ``[pairs, outputs]``."""
        order, groups = routes
        gathered = x[order // _share(x, order)]
        gate, other = np.split(self.wide(gathered, groups), 2, axis=1)
        return _in_order(self.narrow(elementwise.swiglu(gate, other), groups), order)


def _takes(x: mx.array, layer: Any) -> bool:
    """Whether the copies of a layer's weights multiply ``x``, or MLX the weights themselves."""
    return x.dtype == mx.float32 or not layer.weight.size


def _share(tokens: Floats, pairs: NDArray[np.intp]) -> int:
    """The pairs of each token."""
    return max(1, len(pairs) // max(1, len(tokens)))


def _in_order(by_expert: Floats, order: NDArray[np.intp]) -> Floats:
    """The results of pairs that were computed in another order, in their own."""
    result: Floats = np.empty(by_expert.shape, np.float32)
    result[order] = by_expert
    return result


def install(model: Any, exactly: bool) -> bool:
    """Replaces mlx-lm's layers of experts in a float32 model, if there is memory for copies.

    Args:
        exactly: no weight may be rounded; otherwise those are, to bfloat16, that are not quantized.

    Returns:
        Whether any layer was replaced.
    """
    layers = [layer for layer in model.modules() if _is_plain(layer)]
    if not layers or not compiled_experts.available():
        return False
    size = sum(_copy_bytes(layer, exactly) for layer in layers)
    free = memory.free_memory()
    releases = size > SHARE * free and all(_quantized(layer) is not None for layer in layers)
    if releases:
        free += sum(layer[name].nbytes for layer in layers for name in _ARRAYS if name in layer)
    if size > SHARE * free:
        log.info("no memory for weights of experts: %.1f GB", size / 1e9)
        return False
    if not exactly:
        for layer in layers:
            if type(layer) is SwitchLinear:
                layer.weight = layer.weight.astype(mx.bfloat16).astype(mx.float32)
    router, fused = ExpertRouter(), [layer for layer in model.modules() if _is_gated(layer)]
    for layer in fused:
        gate, other, last = parts = layer.gate_proj, layer.up_proj, layer.down_proj
        layer.wide, layer.narrow = _compiled([gate, other]), _compiled([last])
        layer.router = router
        if releases:
            _release(parts)
        layer.__class__ = HostSwitchGLU
        layers = [layer for layer in layers if not any(layer is part for part in parts)]
    for layer in layers:
        layer.experts, layer.router = _compiled([layer]), router
        layer.__class__ = _HOST[type(layer)]
        if releases:
            _release([layer])
    log.info("one product for each expert: %d gated MLPs, %d other layers", len(fused), len(layers))
    return True


def check(model: Any, dtype: mx.Dtype) -> None:
    """Checks the experts of a model that computes in another type than float32.

    Raises:
        UnsupportedModel: they have no quantization with which MLX multiplies them on the CPU.
    """
    for layer in model.modules():
        scaled = isinstance(layer, QuantizedSwitchLinear) and layer.get("global_scale") is not None
        if scaled or (type(layer) is SwitchLinear and layer.weight.dtype != mx.float32):
            what = "with scales of whole experts" if scaled else "that are not quantized"
            name = str(dtype).removeprefix("mlx.core.")
            raise UnsupportedModel(
                f"--dtype {name}: experts {what} are multiplied on the CPU in float32 only"
            )


def _compiled(layers: Sequence[Any]) -> CompiledExperts:
    """The weights of layers with the same input, as one."""
    quantized = [weight for layer in layers if (weight := _quantized(layer)) is not None]
    if quantized:
        return quantized_experts(Quantized.joined(quantized))
    return CompiledExperts(mx.concatenate([layer.weight for layer in layers], axis=1))


def _release(layers: Sequence[Any]) -> None:
    """Frees the weights of layers, which only their copies have from now on."""
    for layer in layers:
        for name in _ARRAYS:
            if name in layer:
                layer[name] = mx.zeros((0,), mx.uint32)
    mx.clear_cache()


def _copy_bytes(layer: Any, exactly: bool) -> int:
    """The bytes of the copy of a layer's weights."""
    quantized, size = _quantized(layer), layer.weight.size
    return panel_bytes(quantized) if quantized is not None else size * (4 if exactly else 2)


def _quantized(layer: Any) -> Quantized | None:
    return Quantized.of(layer) if type(layer) is QuantizedSwitchLinear else None


def _is_plain(layer: Any) -> bool:
    """Whether a layer is of a known kind, with weights that the kernel can read."""
    plain = type(layer) is SwitchLinear and layer.weight.dtype == mx.float32
    return plain or _quantized(layer) is not None


def _is_gated(layer: Any) -> bool:
    """Whether a layer is an MLP with SwiGLU, and without biases."""
    if type(layer) is not SwitchGLU or type(layer.activation) is not SwiGLU:
        return False
    gate, other, last = layer.gate_proj, layer.up_proj, layer.down_proj
    plain = all(_is_plain(part) and "bias" not in part for part in (gate, other, last))
    return plain and _form(gate) == _form(other)


def _form(layer: Any) -> tuple[str, int, int] | None:
    """The form of a layer's weights; None if they are not quantized."""
    weight = _quantized(layer)
    return None if weight is None else weight.form
