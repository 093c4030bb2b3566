"""Replaces a float32 model's slow operations where MLX computes on the CPU: activations, rotary
embedding and attention, and with ``jit`` products, MLPs and experts.

MLX's CPU backend takes 12 ns for each ``exp`` and for the operations that use it (0.32.4, x86-64),
and computes query heads that share a key head one by one. NumPy takes half a nanosecond, on the
same memory. These kernels evaluate their inputs while the graph is built. Such a model is *eager*:
its next step may be built only when nothing else uses the buffers that the step writes. Results are
exact to float32 rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten, tree_unflatten

from chairlift.engine.cpu import activations, elementwise, experts, host_linear, host_mlp
from chairlift.engine.cpu.attention import heads
from chairlift.engine.cpu.attention.blocks import attend, attend_capped
from chairlift.engine.cpu.compiled import amx_matmul, quantized_matmul
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.device import memory
from chairlift.engine.model.adapters.gemma2 import CappedAttention
from chairlift.engine.model.attention import install as install_attention
from chairlift.engine.model.dequantize import QUANTIZED, dequantize_model, float_type
from chairlift.engine.model.recorder import record

# Dequantized weights take this many times the memory of 4-bit weights: float32 and, for AMX,
# bfloat16. And the share of the free memory that they may take.
_DEQUANTIZED, _AMX_SHARE = 11, 0.5
# With fewer weights to a scale, AMX multiplies the tokens of prompts and of many rows faster in
# bfloat16 than as bytes.
_BYTES_GROUP = 64


class Rotation(NamedTuple):
    """A ``HostCall``: the rotary embedding of ``[rows, heads, length, dim]``, at offsets."""

    rope: SharedRope


class SharedRope(Module):
    """Rotary embedding that computes sines and cosines once for each step, not for each layer.

    Layers with the same settings share ``tables``, which are those of one offset array and length.
    Each step has a new offset array, so older tables are never needed again.
    """

    def __init__(self, rope: RoPE, tables: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dims = rope.dims
        self._scale = rope.scale
        # Computed as in MLX: at long positions, different rounding would change results.
        step = math.log(rope.base) / (rope.dims // 2)
        self._frequencies = mx.exp(mx.arange(0, -(rope.dims // 2), -1) * step)
        self._tables = tables

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotates ``[rows, heads, length, dim]``, row r's positions starting at ``offset[r]``."""
        if isinstance(offset, mx.array):
            stand_in = record(Rotation(self), [x, offset], x.shape)
            if stand_in is not None:
                return stand_in
        cos, sin = self._table(offset, x.shape[2])
        half = self._dims // 2
        first, second, rest = x[..., :half], x[..., half : self._dims], x[..., self._dims :]
        rotated = [first * cos - second * sin, first * sin + second * cos]
        result = mx.concatenate([*rotated, rest] if rest.shape[-1] else rotated, axis=-1)
        return result.astype(x.dtype)

    def rotate(self, x: Floats, offset: mx.array) -> Floats:
        """Rotates one token per row, ``[rows, heads, dim]``; all dimensions must be rotated."""
        return elementwise.rotated(x, *self.host_table(offset))

    def host_table(self, offset: mx.array) -> tuple[Floats, Floats]:
        """The cosines and sines of one token per row, ``[rows, dims / 2]``."""
        tables = self._tables
        cos, sin = self._table(offset, 1)
        if "host" not in tables:
            tables["host"] = view(cos)[:, 0, 0], view(sin)[:, 0, 0]
        table: tuple[Floats, Floats] = tables["host"]
        return table

    @property
    def settings(self) -> int:
        """The same number for layers with the same settings."""
        return id(self._tables)

    @property
    def dims(self) -> int:
        """The number of a head's dimensions that are rotated."""
        return self._dims

    def _table(self, offset: int | mx.array, length: int) -> tuple[mx.array, mx.array]:
        tables = self._tables
        if tables.get("offset") is not offset or tables.get("length") != length:
            start = mx.array(offset).reshape(-1)
            positions = (start[:, None] + mx.arange(length)) * self._scale
            angles = positions[:, None, :, None] * self._frequencies
            tables.clear()
            tables |= {"offset": offset, "length": length, "cos": mx.cos(angles)}
            tables["sin"] = mx.sin(angles)
        return tables["cos"], tables["sin"]


def keeps_quantized(size: int, group: int) -> bool:
    """Whether to keep the weights of a model quantized.

    Args:
        size: bytes of its files.
        group: weights that share a scale.
    """
    if not quantized_matmul.available():
        return False
    if not amx_matmul.available() or (quantized_matmul.has_tiles() and group >= _BYTES_GROUP):
        return True
    return _DEQUANTIZED * size > _AMX_SHARE * memory.free_memory()


def _dequantize_others(model: Any) -> None:
    """Dequantizes the layers of a float32 model whose weights no kernel reads.

    So are an attention's projections that are quantized in different ways: as one product they are
    part of a layer that decodes on the host.
    """
    mixed: set[int] = set()
    for layer in model.modules():
        children = layer.children()
        projections = [children.get(name) for name in host_linear.GROUPS[0]]
        if all(projections) and len(set(map(_form, projections))) > 1:
            mixed |= set(map(id, projections))
    for name, layer in model.named_modules():
        if isinstance(layer, QUANTIZED) and layer.scales.dtype in (mx.float32, mx.uint8):
            if id(layer) not in mixed and Quantized.of(layer) is not None:
                continue
            holder: Any = Module()
            holder.layer = layer
            dequantize_model(holder)
            model.update_modules(tree_unflatten([(name, holder.layer)]))


def _form(layer: Any) -> tuple[str, int, int] | None:
    """The form of a layer's quantized weights, if the kernel reads them."""
    weight = Quantized.of(layer) if isinstance(layer, QUANTIZED) else None
    return None if weight is None else weight.form


def install(model: Any, exactly: bool = True) -> bool:
    """Replaces mlx-lm's functions in a float32 model by this package's.

    Args:
        exactly: see ``host_linear.install``.

    Returns:
        Whether the model is eager now.

    Raises:
        UnsupportedModel: nothing multiplies its experts in its type.
    """
    _share_ropes(model)
    has_activations = activations.install(model)
    has_products = _install_products(model, exactly)
    has_products |= bool(heads.install(model))
    for layer in model.modules():
        if isinstance(layer, CappedAttention):
            layer.on_host = attend_capped
    return install_attention(model, attend) or has_activations or has_products


def _install_products(model: Any, exactly: bool) -> bool:
    """Replaces the layers with weights; returns whether there are any to replace.

    Quantized weights whose scales are integers fit models of all types, so the layers alone do not
    tell in which one the model computes.

    Raises:
        UnsupportedModel: nothing multiplies its experts in its type.
    """
    if (dtype := float_type(model)) != mx.float32:
        experts.check(model, dtype)
        return False
    if quantized_matmul.available():
        _dequantize_others(model)
    replaced = host_linear.install(model, exactly)
    host_mlp.install(model)
    return experts.install(model, exactly) or replaced


def _share_ropes(model: Any) -> None:
    tables: dict[tuple[float, ...], dict[str, Any]] = {}
    replaced: list[tuple[str, Module]] = []
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for name, layer in leaves:
        if type(layer) is RoPE and not layer.traditional:
            settings = (layer.dims, layer.base, layer.scale)
            replaced.append((name, SharedRope(layer, tables.setdefault(settings, {}))))
    model.update_modules(tree_unflatten(replaced))
