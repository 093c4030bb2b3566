"""Adds heads of zeros to attention layers whose heads cannot be divided evenly.

A head whose output weights are zero changes nothing, so a layer with 3 key heads becomes one with 4
on two ranks. It computes the same, and takes the time and the KV memory of a layer with 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# The other parts that a layer may have: they treat each head alike.
_PER_HEAD = {"rope", "q_norm", "k_norm"}


def pad_heads(layer: Any, queries: str, keys: str, size: int) -> None:
    """Adds zero heads to an attention layer of Llama's form, if ``size`` does not divide its heads.

    Layers of other forms stay as they are.

    Args:
        queries, keys: the names of the layer's numbers of query heads and of key heads.
        size: the number of ranks.
    """
    heads, key_heads = getattr(layer, queries, None), getattr(layer, keys, None)
    if not isinstance(heads, int) or not isinstance(key_heads, int) or not heads * key_heads:
        return
    if (heads % size == 0 and key_heads % size == 0) or heads % key_heads:
        return
    children = layer.children()
    if not set(_PROJECTIONS) <= set(children) <= {*_PROJECTIONS, *_PER_HEAD}:
        return
    projections = [children[name] for name in _PROJECTIONS]
    if any(type(part) not in (Linear, QuantizedLinear) for part in projections):
        return
    width = layer.q_proj.weight.shape[0] // heads
    norms = [children[name] for name in ("q_norm", "k_norm") if name in children]
    rows = [part.weight.shape[0] for part in projections[:3]]
    if rows != [heads * width, *[key_heads * width] * 2]:
        return
    if any(norm.weight.size != width for norm in norms):
        return
    new_keys = -(-key_heads // size) * size
    new = new_keys * (heads // key_heads)
    outputs = dict(_padded(layer.o_proj, -1, heads, new))
    if len(outputs) != len(_weights(layer.o_proj)):
        return
    layer.o_proj.update(outputs)
    layer.q_proj.update(dict(_padded(layer.q_proj, 0, heads, new)))
    for name in ("k_proj", "v_proj"):
        layer[name].update(dict(_padded(layer[name], 0, key_heads, new_keys)))
    setattr(layer, queries, new)
    setattr(layer, keys, new_keys)


def _weights(layer: Any) -> list[str]:
    """The names of a linear layer's weights, and of the scales and biases of quantized ones."""
    return [name for name in ("weight", "scales", "biases") if layer.get(name) is not None]


def _padded(layer: Any, axis: int, heads: int, new: int) -> Iterator[tuple[str, mx.array]]:
    """A linear layer's arrays with zeros for ``new - heads`` further heads along ``axis``.

    Zeros are also what quantized groups with scales and biases of zero stand for. An array that
    cannot be cut between two heads is left out. The layer's bias belongs to its outputs.
    """
    for name in [*_weights(layer), *(["bias"] if "bias" in layer and axis == 0 else [])]:
        array = layer[name]
        length = array.shape[axis]
        if length % heads == 0:
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, length // heads * (new - heads))
            yield name, mx.pad(array, widths)
