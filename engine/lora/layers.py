"""Makes a model's linear layers add the products of adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import mlx.core as mx

from chairlift.engine.cpu.graph.layer import GraphLayer
from chairlift.engine.cpu.host_linear import GROUPS, LINEAR, HostLayer, Products
from chairlift.engine.cpu.matrix import FEW_TOKENS
from chairlift.engine.lora.fused import FusedAddition
from chairlift.engine.lora.host import HostAddition
from chairlift.engine.lora.low_rank import LowRank, is_linear
from chairlift.engine.model.dequantize import float_type
from chairlift.engine.model.lora_routing import Routing


class AdaptedLayers:
    """The layers of a model that have adapters, by name.

    A layer is changed when its first adapter is loaded, and stays changed. While a model call has
    no adapter, a changed layer computes exactly what it did before.

    Args:
        on_host: compute the products for few tokens in NumPy; the model has to be eager.

    Attributes:
        targets: the layers that may have adapters, by name.
    """

    def __init__(self, model: Any, routing: Routing, on_host: bool) -> None:
        self._model = model
        self._on_host = on_host
        self._routing = routing
        self._dtype = float_type(model)
        self._low_ranks: dict[str, LowRank] = {}
        self._additions: list[HostAddition] = []
        self._fused: list[FusedAddition] = []
        self.targets: dict[str, Any] = {
            name: layer
            for name, layer in model.named_modules()
            # The output layer computes selected positions only; see ``engine.model.head``.
            if is_linear(layer) and name.rpartition(".")[2] != "lm_head"
        }

    def adapt(self, names: Iterable[str]) -> None:
        """Changes those of these layers that are not changed yet."""
        new = [name for name in names if name not in self._low_ranks]
        for name in new:
            layer = self.targets[name]
            low_rank = LowRank(name, layer, self._routing, self._dtype)
            layer.low_rank = self._low_ranks[name] = low_rank
            if not hasattr(type(layer), "is_adapted"):  # by an engine before this one
                layer.__class__ = _adapted(type(layer))
        if new:
            self._add_to_fused()
            self._add_on_host()
            self._add_to_graphs()

    def fill(self, slots: int) -> None:
        """Call this after the ``factors`` of layers have changed; ``slots`` adapters are loaded."""
        for low_rank in self:
            low_rank.fill(low_rank.factors, slots)
        for fused in self._fused:
            fused.fill(slots)
        for addition in self._additions:
            addition.clear()
        self._routing.changed(slots)

    def __iter__(self) -> Any:
        return iter(self._low_ranks.values())

    def __getitem__(self, name: str) -> LowRank:
        """The adapters of a changed layer."""
        return self._low_ranks[name]

    def _add_to_fused(self) -> None:
        """Lets products that take the place of linear layers add those layers' adapters."""
        self._fused = []
        for module in self._model.modules():
            for product in getattr(type(module), "products", ()):
                if any(hasattr(layer, "low_rank") for layer in product.layers):
                    layers = product.layers
                    product.addition = FusedAddition(layers, self._routing, self._dtype)
                    self._fused.append(product.addition)

    def _add_on_host(self) -> None:
        self._additions = []
        for layers in self._host_groups():
            members = [getattr(layer, "low_rank", None) for layer in layers]
            if any(members):
                products: Products = layers[0].products
                products.addition = HostAddition(members, products.matrix.stops, self._routing)
                self._additions.append(products.addition)
        for group in self._plain_groups() if self._on_host else ():
            stops = [*accumulate((member.outputs for member in group), initial=0)]
            addition = HostAddition(group, stops, self._routing)
            self._additions.append(addition)
            for member in group:
                member.host = addition

    def _add_to_graphs(self) -> None:
        """Lets decoder layers with graphs leave tokens with adapters to their code."""
        for layer in self._model.modules():
            if isinstance(graph := getattr(layer, "graph", None), GraphLayer):
                members = [getattr(member, "low_rank", None) for member in layer.modules()]
                graph.additions = [low_rank for low_rank in members if low_rank is not None]

    def _host_groups(self) -> Iterable[list[HostLayer]]:
        groups: defaultdict[int, list[HostLayer]] = defaultdict(list)
        for layer in self._model.modules():
            if isinstance(layer, LINEAR):
                groups[id(layer.products)].append(layer)
        for layers in groups.values():
            layers.sort(key=lambda layer: layer.index)
        return groups.values()

    def _plain_groups(self) -> Iterable[list[LowRank]]:
        """The other layers with adapters; those that mostly read the same input are together."""
        groups: defaultdict[tuple[Any, ...], list[LowRank]] = defaultdict(list)
        for name, low_rank in self._low_ranks.items():
            if low_rank.dtype == mx.float32 and not isinstance(self.targets[name], LINEAR):
                parent, _, last = name.rpartition(".")
                same = next((group for group in GROUPS if last in group), last)
                groups[parent, same, low_rank.inputs].append(low_rank)
        return groups.values()


def _adapted(base: Any) -> Any:
    def call(layer: Any, x: mx.array) -> mx.array:
        y: mx.array = base.__call__(layer, x)
        if isinstance(layer, LINEAR) and layer.products.takes(x):
            return y  # its group's products have been added
        low_rank: LowRank = layer.low_rank
        if low_rank.host is not None and x.size <= FEW_TOKENS * x.shape[-1]:
            return low_rank.host.added(y, x, low_rank)
        return low_rank.added(y, x)

    return type(base.__name__, (base,), {"__call__": call, "is_adapted": True})
