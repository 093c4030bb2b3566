"""Linear layers that have their weights in bfloat16 as well, for few tokens; see ``bfloat16``.

A product of few tokens takes the time of reading the weights: half as many bytes, half the time.
One of many takes that of its arithmetic, and stays MLX's. What a layer computes is asked for while
the graph is being built: such a model is eager, see ``cpu``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from chairlift.engine.cpu import bf16_matmul
from chairlift.engine.cpu.bf16_matmul import Matrix
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import swiglu, view
from chairlift.engine.device import memory
from chairlift.engine.model.trial import Trial, elementwise

log = logging.getLogger(__name__)

# Tokens that are few; and numbers from which a layer is worth it.
FEW = 64
LEAST = 1 << 16
LOOK = 16
# Of the free memory, what the weights may take once more.
SHARE = 0.25
# Layers that read the same input, by what mlx-lm's model files call them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MLP = ("gate_proj", "up_proj", "down_proj")
_TRIAL = Trial(elementwise(1e-3), log, error="an MLP is of another form: %s")


class Products:
    """What layers make of the same input: all of it, as soon as the first is asked."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.matrix = Matrix([layer.weight for layer in layers])
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}

    def take(self, x: mx.array, index: int) -> mx.array:
        """The product of ``x``, ``[..., inputs]``, with one layer's weights."""
        if self._input is not x or index not in self._left:
            product = self.matrix(_tokens(x))
            parts = self.matrix.apart(product)
            self._left = {i: _array(part, x) for i, part in enumerate(parts)}
        taken = self._left.pop(index)
        self._input = x if self._left else None
        return taken


class _Grouped(Module):
    """A layer of a group that has its products computed together."""

    products: Products
    _index: int

    def _join(self, products: Products, index: int) -> None:
        self.products, self._index = products, index


class Bf16Linear(_Grouped, Linear):
    """``x @ weight.T + bias``."""

    def __call__(self, x: mx.array) -> mx.array:
        if not is_small_batch(x):
            whole: mx.array = Linear.__call__(self, x)
            return whole
        product = self.products.take(x, self._index)
        return product + self.bias if "bias" in self else product


class Bf16Embedding(_Grouped, Embedding):
    """An embedding that is the output layer as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        """``x @ weight.T``."""
        if not is_small_batch(x):
            whole: mx.array = Embedding.as_linear(self, x)
            return whole
        return self.products.take(x, self._index)


_KINDS: dict[type, type] = {Linear: Bf16Linear, Embedding: Bf16Embedding}


def install(model: Any, exactly: bool) -> bool:
    """Narrows a float32 model's linear layers, if there is memory for it.

    Args:
        exactly: only those whose weights are bfloat16 numbers anyway; the others' are rounded.

    Returns:
        Whether there were some.
    """
    if not bf16_matmul.available():
        return False
    layers = [layer for _, layer in model.named_modules()]
    wanted = [layer for layer in layers if _wanted(layer, exactly)]
    size = sum(layer.weight.nbytes // 2 for layer in wanted)
    if size > SHARE * memory.free_memory():
        log.info("no memory for the weights in bfloat16 as well: %.1f GB", size / 1e9)
        return False
    for layer in wanted:
        if not exactly:
            layer.weight = layer.weight.astype(mx.bfloat16).astype(mx.float32)
            mx.eval(layer.weight)
        layer.__class__ = _KINDS[type(layer)]
    for layer in layers:
        _group(layer)
    for layer in wanted:
        if not hasattr(layer, "products"):
            layer._join(Products([layer]), 0)
    fused = sum(_fuse(layer) for layer in layers)
    log.info("in bfloat16 for few tokens: %d layers, %d times three as one", len(wanted), fused)
    return bool(wanted)


def _wanted(layer: Any, exactly: bool) -> bool:
    """Whether a layer is one that is worth it, and may be."""
    if type(layer) not in _KINDS or layer.weight.dtype != mx.float32 or layer.weight.size < LEAST:
        return False
    # A few numbers tell of most layers what they are.
    return not exactly or all(map(_exact, (layer.weight[:LOOK], layer.weight)))


def _exact(weight: mx.array) -> bool:
    rounded = weight.astype(mx.bfloat16).astype(mx.float32)
    return bool(mx.array_equal(rounded, weight).item())


def _group(layer: Any) -> None:
    for names in _TOGETHER:
        children = layer.children()
        group = [children.get(name) for name in names]
        if all(type(member) is Bf16Linear for member in group):
            products = Products(group)
            for index, member in enumerate(group):
                member._join(products, index)


def _fuse(layer: Any) -> bool:
    """Computes SwiGLU between its three layers without MLX, if that is what the layer does."""
    if set(layer.children()) != set(_MLP):
        return False
    gate, up, down = (layer[name] for name in _MLP)
    if any(type(part) is not Bf16Linear or "bias" in part for part in (gate, up, down)):
        return False
    theirs: Any = type(layer)

    def fused(own: Any, x: mx.array) -> mx.array:
        if not is_small_batch(x):
            whole: mx.array = theirs.__call__(own, x)
            return whole
        matrix = own.gate_proj.products.matrix
        mixed = swiglu(*matrix.apart(matrix(_tokens(x))))
        return _array(own.down_proj.products.matrix(mixed), x)

    x = mx.random.normal((1, 2, gate.weight.shape[1]), key=mx.random.key(0))
    if not _TRIAL.passes(lambda: layer(x), lambda: fused(layer, x)):
        return False
    layer.__class__ = type(theirs.__name__, (theirs,), {"__call__": fused})
    return True


def is_small_batch(x: mx.array) -> bool:
    """Whether ``[..., inputs]`` are few tokens."""
    return x.size <= FEW * x.shape[-1]


def _tokens(x: mx.array) -> Floats:
    """``[tokens, numbers]``, evaluated."""
    return view(x.astype(mx.float32)).reshape(-1, x.shape[-1])


def _array(product: Floats, x: mx.array) -> mx.array:
    """With ``x``'s axes before its last."""
    return mx.array(product).reshape(*x.shape[:-1], product.shape[-1])
