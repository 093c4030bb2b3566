"""Transformer blocks like Llama's on CUDA: nine operations for nineteen, or six for few rows.

A decode step of few rows takes as long as the host needs to launch it, and for each product MLX
also asks cuBLAS how to compute it. Therefore queries, keys and values are one product, gate and up
are another, products add the residual themselves, and one kernel computes what lies between two
products; products of few tokens also compute norms and SwiGLU (``skinny``). A block is replaced
only if a trial shows that the replacement computes the same.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.step import PackedLayer
from chairlift.cache.pages.layer import PagedLayer
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.cuda.fused_linear import Product, fuse_linears
from chairlift.engine.cuda.heads import WIDE, HeadNorms, Heads, split_heads, swiglu
from chairlift.engine.model.attention import names_of
from chairlift.engine.model.trials.trial import Trial, identical, within_largest

log = logging.getLogger(__name__)

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = {*_QKV, "o_proj", "rope"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
# Names of the number of query heads in mlx-lm's model files.
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
# As a share of the largest number. Fused products round their sums at other places.
TOLERANCE = 0.02
_TRIAL = Trial(within_largest(TOLERANCE), log, error="a layer is of another form: %s")
_BLOCK_TRIAL = Trial(identical, log, error="a block is of another form: %s")


class _Attention(NamedTuple):
    qkv: Product
    out: Product
    heads: Heads
    scale: float


class _Mlp(NamedTuple):
    both: Product
    down: Product


def install(model: Any) -> list[Product]:
    """Replaces those blocks of a model that have Llama's form.

    Returns:
        The products that take the place of their linear layers.
    """
    modules = model.modules()
    blocks = sum(_replace(layer) for layer in modules)
    if blocks:
        log.info("blocks in few operations: %d", blocks)
    return [product for module in modules for product in getattr(type(module), "products", ())]


def _replace(block: Any) -> bool:
    if set(block.children()) != _BLOCK or not _is_sum(block):
        return False
    # Quantized weights do not tell the type of activations: the scales of some are integers.
    dtype = block.input_layernorm.weight.dtype
    attention, mlp = _attention(block.self_attn, dtype), _mlp(block.mlp, dtype)
    if attention is None:
        return False
    original: Any = type(block)
    first, second = block.input_layernorm, block.post_attention_layernorm
    lookup = names_of(block.self_attn)

    def fused(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **more: Any) -> mx.array:
        result: mx.array
        if more or not isinstance(cache, LayerCache | PackedLayer | PagedLayer):
            result = original.__call__(self, x, mask, cache, **more)
            return result
        mixed = _mixed(attention, attention.qkv.normed(x, first), mask, cache, lookup)
        x = attention.out.added(mixed, x)
        if mlp is None:
            result = x + self.mlp(second(x))
            return result
        return mlp.down.added(mlp.both.gated(x, second), x)

    # The products that take the place of linear layers; see ``engine.lora.layers``.
    products = [attention.qkv, attention.out, *(() if mlp is None else mlp)]
    names = {"__call__": fused, "products": products}
    block.__class__ = type(original.__name__, (original,), names)
    return True


def _mixed(
    attention: _Attention, qkv: mx.array, mask: Any, cache: Any, lookup: dict[str, Any]
) -> mx.array:
    """The input of an attention layer's output product: ``[rows, length, heads * dim]``.

    Args:
        qkv: the product of queries, keys and values.
    """
    rows, length, _ = qkv.shape
    queries, keys, values = split_heads(qkv, cache.offset, attention.heads)
    keys, values = cache.update_and_fetch(keys, values)
    mixed: mx.array = lookup["scaled_dot_product_attention"](
        queries, keys, values, cache=cache, scale=attention.scale, mask=mask
    )
    if length > 1:
        mixed = mixed.swapaxes(1, 2)
    return mixed.reshape(rows, length, -1)


def _is_sum(block: Any) -> bool:
    """Whether a block is ``y = x + attention(norm(x))``, then ``y + mlp(norm(y))``."""
    norms = block.input_layernorm, block.post_attention_layernorm
    if any(type(norm) is not RMSNorm for norm in norms):
        return False
    first, second = norms
    x = _input(first.weight.size, first.weight.dtype, 2)

    def sum_() -> mx.array:
        attended = x + block.self_attn(first(x), None, None)
        result: mx.array = attended + block.mlp(second(attended))
        return result

    return _BLOCK_TRIAL.passes(sum_, lambda: block(x, None, None))


def _attention(layer: Any, dtype: mx.Dtype) -> _Attention | None:
    children = layer.children()
    names = set(children)
    if names not in (_ATTENTION, _ATTENTION | _NORMS) or "bias" in layer.o_proj:
        return None
    projections = [children[name] for name in _QKV]
    queries, keys, values = (projection.weight.shape[0] for projection in projections)
    heads = next((getattr(layer, name) for name in _HEADS if hasattr(layer, name)), None)
    frequencies = _frequencies(layer.rope)
    if not heads or keys != values or frequencies is None or not hasattr(layer, "scale"):
        return None
    dim = queries // heads
    norms = None
    if names & _NORMS:
        pair = layer.q_norm, layer.k_norm
        if any(type(norm) is not RMSNorm or norm.weight.size != dim for norm in pair):
            return None
        norms = HeadNorms(pair[0].weight, pair[1].weight, pair[0].eps)
    biases = [projection["bias"] for projection in projections if "bias" in projection]
    if len(biases) not in (0, 3):
        return None
    bias = mx.concatenate(biases) if biases else None
    qkv, out = fuse_linears(projections), fuse_linears([layer.o_proj])
    if qkv is None or out is None:
        return None
    split = Heads(heads, keys // dim, dim, frequencies, norms, bias)
    fused = _Attention(qkv, out, split, layer.scale)
    return fused if _attends_alike(layer, fused, dtype) else None


def _frequencies(rope: Any) -> mx.array | None:
    """The angle by which one position rotates each pair: ``[rotated numbers / 2]`` float32.

    None if the rotary embedding does anything beyond that rotation.
    """
    if getattr(rope, "traditional", False):
        return None
    if type(rope) is RoPE:
        half = rope.dims // 2
        return mx.exp(mx.arange(half) * (-math.log(rope.base) / half)) * rope.scale
    if not hasattr(rope, "_freqs"):
        return None
    frequencies = 1 / rope._freqs
    # NOTE: compare here, because YaRN also scales queries and keys, which a comparison of
    # attention's results may miss.
    x = mx.ones((1, 1, 1, 2 * frequencies.size))
    cosines, sines = mx.cos(frequencies), mx.sin(frequencies)
    rotated = [cosines - sines, cosines + sines]
    alike = _TRIAL.passes(
        lambda: rope(x, offset=1), lambda: mx.concatenate(rotated)[None, None, None]
    )
    return frequencies if alike else None


def _mlp(layer: Any, dtype: mx.Dtype) -> _Mlp | None:
    children = layer.children()
    if set(children) != _MLP or any("bias" in part for part in children.values()):
        return None
    gate, up = layer.gate_proj, layer.up_proj
    if gate.weight.shape != up.weight.shape or gate.weight.shape[0] % WIDE:
        return None
    both, down = fuse_linears([gate, up]), fuse_linears([layer.down_proj])
    if both is None or down is None:
        return None
    x = _input(layer.down_proj.weight.shape[0], dtype, 2)
    alike = _TRIAL.passes(lambda: layer(x), lambda: down(swiglu(both(x))))
    return _Mlp(both, down) if alike else None


def _attends_alike(layer: Any, fused: _Attention, dtype: mx.Dtype) -> bool:
    """Whether a layer and its fused form give the same in a prompt step and in a decode step."""
    inputs = layer.o_proj.weight.shape[0]
    lookup = names_of(layer)

    def original(x: mx.array, mask: Any, cache: LayerCache) -> mx.array:
        result: mx.array = layer(x, mask, cache)
        return result

    def ours(x: mx.array, mask: Any, cache: LayerCache) -> mx.array:
        return fused.out(_mixed(fused, fused.qkv(x), mask, cache, lookup))

    def results_of(call: Any) -> mx.array:
        batch = BatchCache([LayerKind(None)])
        cache = batch.layers[0]
        for _ in range(2):
            batch.join(columns=8)
        results = []
        for length in (3, 1):
            with batch.step(length):
                x = _input(inputs, dtype, length)
                results.append(call(x, cache.make_mask(length), cache))
        return mx.concatenate(results, axis=1)

    return _TRIAL.passes(lambda: results_of(original), lambda: results_of(ours))


def _input(width: int, dtype: mx.Dtype, length: int) -> mx.array:
    """Random activations: ``[2, length, width]``."""
    return mx.random.normal((2, length, width), dtype, key=mx.random.key(length))
