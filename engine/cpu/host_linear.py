"""Linear layers that multiply without MLX; see ``matrix``.

A product of few tokens takes as long as reading the weights, in whichever form a ``Backend`` keeps
them. One of more tokens than a backend is good for stays MLX's. Layers evaluate their input
while the graph is built, so such a model is eager; see ``kernels``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from chairlift.engine.cpu.elementwise import geglu, swiglu
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.matrix import Backend, apart, backends
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view
from chairlift.engine.device import memory
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

# Smaller layers gain less than a further copy between MLX and NumPy costs.
MIN_WEIGHTS = 1 << 16
# Rows of a weight that are checked first. They rule out most weights that are not bfloat16.
SAMPLE_ROWS = 16
# Share of the free memory that the copies may take.
SHARE = 0.25
# Layers that read the same input, by their names in mlx-lm's model files.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MLP = ("gate_proj", "up_proj", "down_proj")
_TRIAL = Trial(elementwise(1e-3), log, error="an MLP is of another form: %s")


class Products:
    """The products of one input with several layers, computed when the first layer asks.

    Attributes:
        matrix: the layers' weights.
        addition: adds to the products, ``[tokens, outputs of all layers]``, what something else
            computes from the input; see ``engine.lora``.
    """

    def __init__(self, layers: Sequence[Any], backend: Backend) -> None:
        self.matrix = backend.make([layer.weight for layer in layers])
        self._max_tokens = backend.max_tokens
        self.addition: Callable[[Floats, Floats], None] | None = None
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs of all layers]``; see ``Matrix``."""
        product = self.matrix(x)
        if self.addition is not None:
            self.addition(x, product)
        return product

    def apart(self, x: Floats) -> list[Floats]:
        """As a call, but the outputs of each layer."""
        return apart(self(x), self.matrix.stops)

    def build(self, build: ProgramBuilder, name: str, x: Floats) -> Floats:
        """As a call, without ``addition``; see ``ProgramBuilder.product``.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        return build.product(name, self.matrix, x)

    def takes(self, x: mx.array) -> bool:
        """Whether ``[..., inputs]`` are few enough tokens; MLX multiplies more."""
        return x.size <= self._max_tokens * x.shape[-1]

    def take(self, x: mx.array, index: int) -> mx.array:
        """The product of ``x``, ``[..., inputs]``, with one layer's weights."""
        if self._input is not x or index not in self._left:
            parts = self.apart(_tokens(x))
            self._left = {i: _array(part, x) for i, part in enumerate(parts)}
        taken = self._left.pop(index)
        self._input = x if self._left else None
        return taken


class _Grouped(Module):
    """A layer whose product is computed together with those of its group."""

    products: Products
    index: int

    def _join(self, products: Products, index: int) -> None:
        self.products, self.index = products, index


class HostLinear(_Grouped, Linear):
    """``x @ weight.T + bias``."""

    def __call__(self, x: mx.array) -> mx.array:
        if not self.products.takes(x):
            product: mx.array = Linear.__call__(self, x)
            return product
        product = self.products.take(x, self.index)
        return product + self.bias if "bias" in self else product


class HostEmbedding(_Grouped, Embedding):
    """An embedding that is also the output layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        """``x @ weight.T``."""
        if not self.products.takes(x):
            product: mx.array = Embedding.as_linear(self, x)
            return product
        return self.products.take(x, self.index)


_KINDS: dict[type, type] = {Linear: HostLinear, Embedding: HostEmbedding}


def install(model: Any, exactly: bool) -> bool:
    """Gives a float32 model's linear layers the fastest backend for whose copies there is memory.

    Args:
        exactly: no weight may be rounded. Otherwise, a backend that copies weights rounds them to
            bfloat16.

    Returns:
        Whether any layer was replaced.
    """
    layers = [layer for _, layer in model.named_modules()]
    suitable = [layer for layer in layers if _is_suitable(layer)]
    for backend in backends():
        chosen, size = suitable, 0
        if copies := any(backend.copy_bytes):
            narrow = {id(layer) for layer in suitable if not exactly or _is_exact(layer.weight)}
            if backend.needs_bf16:
                chosen = [layer for layer in suitable if id(layer) in narrow]
            size = sum(
                layer.weight.size * backend.copy_bytes[id(layer) not in narrow] for layer in chosen
            )
        if size > SHARE * memory.free_memory():
            log.info("no memory for weights of %s: %.1f GB", backend.name, size / 1e9)
        elif chosen:
            _replace(layers, chosen, backend, rounded=copies and not exactly)
            return True
    return False


def _replace(layers: list[Any], chosen: list[Any], backend: Backend, rounded: bool) -> None:
    for layer in chosen:
        if rounded:
            layer.weight = layer.weight.astype(mx.bfloat16).astype(mx.float32)
            mx.eval(layer.weight)
        layer.__class__ = _KINDS[type(layer)]
    for layer in layers:
        _group(layer, backend)
    for layer in chosen:
        if not hasattr(layer, "products"):
            layer._join(Products([layer], backend), 0)
    fused = sum(_fuse(layer) for layer in layers)
    log.info(
        "products of few tokens: %s, %d layers, %d fused MLPs", backend.name, len(chosen), fused
    )


def _is_suitable(layer: Any) -> bool:
    """Whether a layer is of a known kind, and large enough."""
    return (
        type(layer) in _KINDS
        and layer.weight.dtype == mx.float32
        and layer.weight.size >= MIN_WEIGHTS
    )


def _is_exact(weight: mx.array) -> bool:
    """Whether all weights are bfloat16 numbers."""
    return all(map(_equals_rounded, (weight[:SAMPLE_ROWS], weight)))


def _equals_rounded(weight: mx.array) -> bool:
    rounded = weight.astype(mx.bfloat16).astype(mx.float32)
    return bool(mx.array_equal(rounded, weight).item())


def _group(layer: Any, backend: Backend) -> None:
    for names in GROUPS:
        children = layer.children()
        group = [children.get(name) for name in names]
        if all(type(member) is HostLinear for member in group):
            if not any(backend.copy_bytes):
                _stack(group)
            products = Products(group, backend)
            for index, member in enumerate(group):
                member._join(products, index)


def _stack(layers: Sequence[Any]) -> None:
    """Puts the weights of layers behind each other, so that one product reads all of them."""
    stacked = mx.concatenate([layer.weight for layer in layers])
    start = 0
    for layer in layers:
        stop = start + len(layer.weight)
        layer.weight, start = stacked[start:stop], stop
    mx.eval([layer.weight for layer in layers])


class HostMlp:
    """An MLP with a gate, of few tokens.

    Attributes:
        products: its products.

    Args:
        layer: its layers are of one group, and have host products.
        activation: computes ``[tokens, numbers]`` of those of the gate and of the other layer.
    """

    def __init__(self, layer: Any, activation: Callable[[Floats, Floats], Floats]) -> None:
        self._wide: Products = layer.gate_proj.products
        self._down: Products = layer.down_proj.products
        self._activation = activation
        self.products = self._wide, self._down

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``; see ``Matrix``."""
        return self._down(self._activation(*self._wide.apart(x)))

    def build(self, build: ProgramBuilder, x: Floats) -> Floats:
        """As a call, without the products' additions.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        wide = apart(self._wide.build(build, "wide", x), self._wide.matrix.stops)
        return self._down.build(
            build, "down", build.gated(self._activation.__name__, "gated", *wide)
        )


def _fuse(layer: Any) -> bool:
    """Replaces an MLP by one that computes without MLX, if a trial gives the same."""
    if set(layer.children()) != set(_MLP):
        return False
    gate, up, down = (layer[name] for name in _MLP)
    if any(type(part) is not HostLinear or "bias" in part for part in (gate, up, down)):
        return False
    x = mx.random.normal((1, 2, gate.weight.shape[1]), key=mx.random.key(0))
    return any(_fuse_with(layer, activation, x) for activation in (swiglu, geglu))


def _fuse_with(layer: Any, activation: Callable[[Floats, Floats], Floats], trial: mx.array) -> bool:
    base: Any = type(layer)
    host = HostMlp(layer, activation)

    def fused(layer: Any, x: mx.array) -> mx.array:
        if not layer.gate_proj.products.takes(x):
            result: mx.array = base.__call__(layer, x)
            return result
        return _array(layer.host(_tokens(x)), x)

    if not _TRIAL.passes(lambda: layer(trial), lambda: _array(host(_tokens(trial)), trial)):
        return False
    layer.__class__ = type(base.__name__, (base,), {"__call__": fused})
    layer.host = host
    return True


def _tokens(x: mx.array) -> Floats:
    """Evaluates ``x`` as ``[tokens, inputs]``."""
    return view(x.astype(mx.float32)).reshape(-1, x.shape[-1])


def _array(product: Floats, x: mx.array) -> mx.array:
    """The product with the leading axes of ``x``."""
    return mx.array(product).reshape(*x.shape[:-1], product.shape[-1])
