"""Adds the steps of products with a matrix for each head, which multi-head latent attention has."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts
from chairlift.engine.cpu.compiled.quantized_matmul import panel_bytes, quantized_experts
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.graph.graph import Array, NoGraphError
from chairlift.engine.cpu.graph.lowering import Lowering
from chairlift.engine.device import memory
from chairlift.engine.model.layers.head_products import HeadProduct

# Share of the free memory that the copy of a layer's weights may take.
SHARE = 0.25


def lower_head_product(lowering: Lowering, operation: HeadProduct, x: Array) -> Array:
    """Adds the steps of a product; returns ``[tokens, heads, 1, outputs]``.

    Heads are multiplied as experts are: one head's tokens after those of another.

    Raises:
        NoGraphError: no kernel reads the weights, or there is no memory for a copy of them.
    """
    weights = _weights_of(operation.layer)
    tokens, heads, _, inputs = x.shape
    by_head = lowering.contiguous(x[:, :, 0].swapaxes(0, 1)).reshape(-1, inputs)
    groups = np.array([(head, head * tokens, tokens) for head in range(heads)], np.int64)
    product, _ = lowering.program.experts(lowering.name(), weights, by_head, groups)
    lowering.kept.append(groups)
    return product.reshape(heads, tokens, 1, -1).swapaxes(0, 1)


def _weights_of(layer: Any) -> CompiledExperts:
    """A layer's weights as the kernel reads them; the layer keeps them."""
    found: CompiledExperts | None = getattr(layer, "heads", None)
    if found is not None:
        return found
    quantized = Quantized.of(layer) if "scales" in layer else None
    if quantized is None and "scales" in layer:
        raise NoGraphError("no kernel reads a weight of heads")
    size = layer.weight.nbytes if quantized is None else panel_bytes(quantized)
    if size > SHARE * memory.free_memory():
        raise NoGraphError(f"no memory for weights of heads: {size / 1e9:.1f} GB")
    found = CompiledExperts(layer.weight) if quantized is None else quantized_experts(quantized)
    layer.heads = found
    return found
