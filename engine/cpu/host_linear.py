"""Linear layers that multiply without MLX; see ``matrix``.

A product of few tokens takes as long as reading the weights, in whichever form a ``Backend`` keeps
them. One of more tokens than a backend is good for stays MLX's. Layers evaluate their input
while the graph is built, so such a model is eager; see ``kernels``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from chairlift.engine.cpu.compiled import quantized_matmul
from chairlift.engine.cpu.compiled.quantized_matmul import panel_bytes, quantized_matrix
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.matrix import Backend, Matrix, apart, backends
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view
from chairlift.engine.device import memory
from chairlift.engine.model.recorder import record

log = logging.getLogger(__name__)

# Smaller layers gain less than a further copy between MLX and NumPy costs.
MIN_WEIGHTS = 1 << 16
# Rows of a weight that are checked first. They rule out most weights that are not bfloat16.
SAMPLE_ROWS = 16
# Share of the free memory that the copies may take.
SHARE = 0.25
# The same of quantized weights: MLX's products with these take many times as long.
QUANTIZED_SHARE = 0.8
# Layers that read the same input, by their names in mlx-lm's model files.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Addition(Protocol):
    """Adds to products what something else computes from the input; see ``engine.lora``."""

    @property
    def applies(self) -> bool:
        """Whether it adds anything in the current model call."""
        ...

    def __call__(self, x: Floats, product: Floats) -> None:
        """Adds to ``product``, ``[tokens, outputs of all layers]``, what ``x`` gives."""
        ...


class Products:
    """The products of one input with several layers, computed when the first layer asks.

    Attributes:
        addition: what is added to the products; None: nothing.

    Args:
        matrix: the layers' weights.
        max_tokens: MLX multiplies more tokens.
    """

    def __init__(self, matrix: Matrix, max_tokens: float = math.inf) -> None:
        self.matrix = matrix
        self._max_tokens = max_tokens
        self.addition: Addition | None = None
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

    @property
    def is_plain(self) -> bool:
        """Whether nothing is added to the products in the current model call."""
        return self.addition is None or not self.addition.applies

    def takes(self, x: mx.array) -> bool:
        """Whether ``[..., inputs]`` are few enough tokens; MLX multiplies more."""
        return x.size <= self._max_tokens * x.shape[-1]

    def take(self, x: mx.array, index: int) -> mx.array:
        """The product of ``x``, ``[..., inputs]``, with one layer's weights."""
        start, stop = self.matrix.stops[index : index + 2]
        stand_in = record(Product(self, index), [x], (*x.shape[:-1], stop - start))
        if stand_in is not None:
            return stand_in
        if self._input is not x or index not in self._left:
            parts = self.apart(tokens_of(x))
            self._left = {i: array_like(part, x) for i, part in enumerate(parts)}
        taken = self._left.pop(index)
        self._input = x if self._left else None
        return taken


class Product(NamedTuple):
    """A ``HostCall``: the product of ``[..., inputs]`` with one layer of a group."""

    products: Products
    member: int


class HostLayer(Module):
    """A layer whose product is computed together with those of its group.

    Attributes:
        products: those of the group.
        index: the layer's number in the group.
    """

    products: Products
    index: int

    def join(self, products: Products, index: int) -> None:
        """Makes the layer a member of a group."""
        self.products, self.index = products, index


class HostLinear(HostLayer, Linear):
    """``x @ weight.T + bias``."""

    def __call__(self, x: mx.array) -> mx.array:
        if not self.products.takes(x):
            product: mx.array = Linear.__call__(self, x)
            return product
        product = self.products.take(x, self.index)
        return product + self.bias if "bias" in self else product


class HostEmbedding(HostLayer, Embedding):
    """An embedding that is also the output layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        """``x @ weight.T``."""
        if not self.products.takes(x):
            product: mx.array = Embedding.as_linear(self, x)
            return product
        return self.products.take(x, self.index)


class HostQuantizedLinear(HostLayer, QuantizedLinear):
    """``x @ weight.T + bias``, with a quantized weight."""

    def __call__(self, x: mx.array) -> mx.array:
        product = self.products.take(x, self.index)
        return product + self.bias if "bias" in self else product


class HostQuantizedEmbedding(HostLayer, QuantizedEmbedding):
    """A quantized embedding that is also the output layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        """``x @ weight.T``."""
        return self.products.take(x, self.index)


_KINDS: dict[type, type] = {Linear: HostLinear, Embedding: HostEmbedding}
_QUANTIZED: dict[type, type] = {
    QuantizedLinear: HostQuantizedLinear,
    QuantizedEmbedding: HostQuantizedEmbedding,
}
# Layers whose products may be computed together.
LINEAR = (HostLinear, HostQuantizedLinear)


def install(model: Any, exactly: bool) -> bool:
    """Replaces the linear layers of a model that computes in float32.

    Args:
        exactly: no weight may be rounded; see ``_install_plain``.

    Returns:
        Whether any layer was replaced.
    """
    layers = [layer for _, layer in model.named_modules()]
    replaced = _install_quantized(layers)
    replaced |= _install_plain(layers, exactly)
    return replaced


def _install_quantized(layers: Sequence[Any]) -> bool:
    """Gives quantized layers compiled products if there is memory for copies of their weights."""
    weights = {id(layer): weight for layer in layers if (weight := _quantized(layer)) is not None}
    if not weights or not quantized_matmul.available():
        return False
    size = sum(map(panel_bytes, weights.values()))
    if size > QUANTIZED_SHARE * memory.free_memory():
        log.warning("no memory for copies of quantized weights: %.1f GB", size / 1e9)
        return False

    def weight_of(layer: Any) -> Quantized | None:
        return weights.get(id(layer))

    def join(group: Sequence[Any]) -> None:
        products = Products(quantized_matrix([weights[id(member)] for member in group]))
        for index, member in enumerate(group):
            member.__class__ = _QUANTIZED[type(member)]
            member.join(products, index)

    for layer in layers:
        for group in _groups(layer):
            forms = {weight and weight.form for weight in map(weight_of, group)}
            if len(forms) == 1 and forms != {None}:
                join(group)
    for layer in layers:
        if id(layer) in weights and not isinstance(layer, HostLayer):
            join([layer])
    log.info("products of quantized weights: %d layers", len(weights))
    return True


def _quantized(layer: Any) -> Quantized | None:
    return Quantized.of(layer) if type(layer) in _QUANTIZED else None


def _groups(layer: Any) -> list[list[Any]]:
    """The groups of layers with the same input that a layer has all members of."""
    children = layer.children()
    groups = [[children.get(name) for name in names] for names in GROUPS]
    return [group for group in groups if all(group)]


def _install_plain(layers: list[Any], exactly: bool) -> bool:
    """Gives float32 layers the fastest backend for whose copies there is memory.

    Args:
        exactly: no weight may be rounded. Otherwise, a backend that copies weights rounds them to
            bfloat16.

    Returns:
        Whether any layer was replaced.
    """
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
            layer.join(_products([layer], backend), 0)
    log.info("products of few tokens: %s, %d layers", backend.name, len(chosen))


def _products(layers: Sequence[Any], backend: Backend) -> Products:
    return Products(backend.make([layer.weight for layer in layers]), backend.max_tokens)


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
    for group in _groups(layer):
        if all(type(member) is HostLinear for member in group):
            if not any(backend.copy_bytes):
                _stack(group)
            products = _products(group, backend)
            for index, member in enumerate(group):
                member.join(products, index)


def _stack(layers: Sequence[Any]) -> None:
    """Puts the weights of layers behind each other, so that one product reads all of them."""
    stacked = mx.concatenate([layer.weight for layer in layers])
    start = 0
    for layer in layers:
        stop = start + len(layer.weight)
        layer.weight, start = stacked[start:stop], stop
    mx.eval([layer.weight for layer in layers])


def tokens_of(x: mx.array) -> Floats:
    """Evaluates ``x`` as ``[tokens, inputs]``."""
    return view(x.astype(mx.float32)).reshape(-1, x.shape[-1])


def array_like(product: Floats, x: mx.array) -> mx.array:
    """The product with the leading axes of ``x``."""
    return mx.array(product).reshape(*x.shape[:-1], product.shape[-1])
