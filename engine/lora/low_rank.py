"""One linear layer's adapters, and their products in MLX."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from chairlift.engine.cuda import low_rank as cuda_low_rank
from chairlift.engine.model.lora_routing import AdapterPart, Call, Routing


class LowRankError(ValueError):
    """A layer computes other tokens than the model call has."""


class Factors(NamedTuple):
    """One adapter's matrices for one layer, ``x @ a @ b``; its scale is part of ``b``.

    Attributes:
        a: ``[inputs, rank]``.
        b: ``[rank, outputs]``.
    """

    a: mx.array
    b: mx.array


class HostProducts(Protocol):
    """Computes a layer's products without MLX; see ``engine.lora.host``."""

    def added(self, y: mx.array, x: mx.array, low_rank: LowRank) -> mx.array:
        """See ``LowRank.added``; ``low_rank`` is the layer's."""
        ...


class LowRank:
    """The matrices of all adapters of one linear layer, or of several as one, side by side.

    Adapter s has the columns ``[s * rank, (s + 1) * rank)`` of ``a`` and these rows of ``b``; an
    adapter that does not change this layer has zeros there.

    Args:
        dtype: the model's type, which the matrices get if the layer's weight has none.
        outputs: the number of outputs, if it is not that of ``layer``.

    Attributes:
        name: the layer's path in the model.
        factors: the adapters that change this layer, by slot.
        seen: whether the layer has been computed with an adapter.
        host: computes the products for few tokens; None: MLX does.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        routing: Routing,
        dtype: mx.Dtype,
        outputs: int | None = None,
    ) -> None:
        self.name = name
        self.inputs, own_outputs = dimensions(layer)
        self.outputs = own_outputs if outputs is None else outputs
        own: mx.Dtype = layer.get("scales", layer.weight).dtype
        self.dtype = own if mx.issubdtype(own, mx.floating) else dtype
        self.factors: dict[int, Factors] = {}
        self.seen = False
        self.host: HostProducts | None = None
        self._routing = routing
        self._slots = self._rank = 0
        self._a = self._b = mx.zeros((0, 0))
        # The same matrices for the CUDA kernel; None: MLX computes all products.
        self._stacked: tuple[mx.array, mx.array] | None = None

    @property
    def applies(self) -> bool:
        """Whether a token of the current model call has an adapter of this layer."""
        call = self._routing.call
        return call is not None and not call.slots.isdisjoint(self.factors)

    def fill(self, factors: dict[int, Factors], slots: int) -> None:
        """Replaces the adapters by ``factors``; there are ``slots`` adapters in all."""
        self.factors = factors
        self._slots = slots
        self._rank = rank = max((one.a.shape[1] for one in factors.values()), default=0)
        columns = [mx.zeros((self.inputs, rank), self.dtype)] * slots
        rows = [mx.zeros((rank, self.outputs), self.dtype)] * slots
        for slot, one in factors.items():
            missing = rank - one.a.shape[1]
            columns[slot] = mx.pad(one.a, [(0, 0), (0, missing)])
            rows[slot] = mx.pad(one.b, [(0, missing), (0, 0)])
        if factors:
            self._a, self._b = mx.concatenate(columns, axis=1), mx.concatenate(rows)
            mx.eval(self._a, self._b)
        else:
            self._a = self._b = mx.zeros((0, 0))
        self._stacked = None
        if factors and cuda_low_rank.is_fit(self.inputs, rank) and cuda_low_rank.works():
            stacked = mx.contiguous(self._a.T).reshape(slots, rank, self.inputs)
            self._stacked = stacked, self._b.reshape(slots, rank, self.outputs)
            mx.eval(self._stacked)

    def added(self, y: mx.array, x: mx.array) -> mx.array:
        """Adds the products of the current call's adapters to a layer's output.

        Args:
            y: ``[..., outputs]``.
            x: ``[..., inputs]``.

        Raises:
            LowRankError: these are not the call's tokens.
        """
        call = self._routing.call
        if call is None or not self.applies:
            return y
        self.check_tokens(call, x.size // self.inputs)
        self.seen = True
        flat, outputs = x.reshape(-1, self.inputs), y.reshape(-1, self.outputs)
        parts = call.parts
        if len(parts) > 1:
            sums = [
                self._sum(outputs[part.start : part.stop], flat[part.start : part.stop], call, part)
                for part in parts
            ]
            return mx.concatenate(sums).reshape(y.shape)
        return self._sum(outputs, flat, call, parts[0]).reshape(y.shape)

    def check_tokens(self, call: Call, tokens: int) -> None:
        """Raises LowRankError if these are not the call's tokens."""
        if tokens != call.tokens:
            raise LowRankError(f"{self.name} computes {tokens} of {call.tokens} tokens")

    def _sum(self, y: mx.array, x: mx.array, call: Call, part: AdapterPart) -> mx.array:
        """Adds the products for the tokens of one part to ``y``, their ``[tokens, outputs]``."""
        if not part.mixed:
            one = self.factors.get(-1 if part.slot is None else part.slot)
            return y if one is None else mx.addmm(y, x @ one.a, one.b)
        few = part.stop - part.start <= cuda_low_rank.MAX_TOKENS
        if self._stacked is not None and few and x.dtype == y.dtype == self.dtype:
            own = call.own if len(call.parts) == 1 else call.own[part.start : part.stop]
            return cuda_low_rank.add_low_rank(y, x, own, *self._stacked)
        narrow = x @ self._a
        # Not a product with zeros: another adapter's numbers may have become infinite.
        own = mx.where(call.mask(part, self._slots, self._rank), narrow, 0)
        return mx.addmm(y, own, self._b)


def dimensions(layer: Any) -> tuple[int, int]:
    """The inputs and outputs of a linear layer, quantized or not."""
    outputs, inputs = layer.weight.shape
    if isinstance(layer, QuantizedLinear):
        inputs = layer.scales.shape[1] * layer.group_size
    return inputs, outputs


def is_linear(layer: Any) -> bool:
    """Whether a layer is one that adapters can change."""
    return isinstance(layer, Linear | QuantizedLinear)
