"""Quantized weights and experts on CUDA, with MLX operations instead of the kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model as conformance_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from support.engine.on_cuda import kernels
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.cuda import experts, quantized
from chairlift.engine.cuda.experts import MIN_LISTED, ExpertProduct
from chairlift.engine.cuda.grouped import (
    FORMS,
    IN_ORDER,
    MAX_LISTED,
    PairRows,
    Weights,
    block_of,
)
from chairlift.engine.cuda.quantized import FEW_TOKENS, MAX_TOKENS
from chairlift.engine.model import attention

__all__ = ["kernels"]

# Tokens of each product's only expert, or its pairs; and the sizes of tiles.
CALLS: list[int] = []
TILED: list[int] = []
# Memory for dequantized weights.
ROOM = 1 << 30


def _grouped_product(
    x: mx.array,
    own: mx.array,
    weights: Weights,
    rows: PairRows = IN_ORDER,
    *,
    listed: bool = False,
) -> mx.array:
    weight: Any = weights.weight
    one = len(weight) == 1 and not listed and rows is IN_ORDER
    CALLS.append(len(x) if one else len(own))
    if listed:
        assert 0 < len(own) <= MAX_LISTED
        x = mx.repeat(x, len(own) // len(x), axis=0)
    if rows.read is not None:
        x = x[rows.read]
    if weights.bits:
        assert weights.scales is not None
        weight = mx.dequantize(
            weight, weights.scales, weights.biases, group_size=weights.group, bits=weights.bits
        )
    numbers = mx.zeros((len(x),), mx.uint32) if one else own
    assert listed or (numbers[1:] >= numbers[:-1]).all().item(), "sorted"
    y = (x[:, None] @ weight[numbers].swapaxes(1, 2))[:, 0]
    y = y if weights.bias is None else y + weights.bias[numbers]
    if rows.written is not None:
        y = y[mx.argsort(rows.written)]
    return y


def _tiled_product(
    x: mx.array, own: mx.array, weights: Weights, tokens: int, rows: PairRows = IN_ORDER
) -> mx.array:
    TILED.append(tokens)
    return _grouped_product(x, own, weights, rows)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_kernels(monkeypatch)


def _replace_kernels(patch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    TILED.clear()
    for module in (quantized, experts):
        patch.setattr(module, "grouped_product", _grouped_product)
        patch.setattr(module, "kernel_works", lambda *form: True)
    patch.setattr(experts, "tiles_work", lambda *form: True)
    patch.setattr(experts, "tiled_product", _tiled_product)
    # The kernel takes neither the CPU's type nor tiny shapes.
    patch.setattr(Weights, "are_fit", property(lambda self: True))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_every_number_of_tokens_gets_the_dequantized_product(
    bits: int, group: int, keeps: bool, grouped: None
) -> None:
    layer = nn.Linear(128, 96)
    layer.bias = mx.random.normal((96,))
    small = nn.QuantizedLinear.from_linear(layer, group, bits)
    whole = mx.dequantize(small.weight, small.scales, small.biases, group, bits)
    model = nn.Sequential(small)
    quantized.install(model, [], ROOM if keeps else 0)
    most = FEW_TOKENS[bits] if keeps else MAX_TOKENS
    for tokens in (1, 2, 7, most, most + 1, 300):
        x = mx.random.normal((tokens, 1, 128))
        expected = x @ whole.T + layer.bias
        assert mx.allclose(model(x), expected, atol=1e-4).item(), tokens
    # A step that computes only embeddings calls the output layer with no tokens.
    assert model(mx.zeros((0, 1, 128))).shape == (0, 1, 96)
    assert [2, 7, most] == CALLS
    assert sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters())) == sum(
        array.nbytes for array in (small.weight, small.scales, small.biases, small.bias)
    )


@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [*((bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)), *((*FORMS[m], m) for m in FORMS)],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_weights_without_a_kernel_are_dequantized(
    bits: int, group: int, mode: str, keeps: bool
) -> None:
    """Every quantization of MLX, also of weights that the kernel could never read."""
    layer = nn.QuantizedLinear(128, 96, bias=False, group_size=group, bits=bits, mode=mode)
    weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), group, bits, mode)
    model = nn.Sequential(layer)
    quantized.install(model, [], ROOM if keeps else 0)
    for tokens in (1, 2, MAX_TOKENS + 1):
        x = mx.random.normal((tokens, 128)).astype(weight.dtype)
        expected = x @ weight.T
        tolerance = 1e-4 if weight.dtype == mx.float32 else 0.03
        assert mx.allclose(model(x), expected, rtol=tolerance, atol=tolerance).item()
        y = mx.random.normal((tokens, 96)).astype(weight.dtype)
        total = layer.product.added(x, y)
        assert mx.allclose(total, expected + y, rtol=tolerance, atol=tolerance).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("keeps", [True, False])
def test_weights_without_a_type_get_that_of_the_model(dtype: mx.Dtype, keeps: bool) -> None:
    model = nn.Sequential(
        nn.QuantizedLinear(64, 96, bias=False, mode="mxfp4"), nn.RMSNorm(96), nn.Linear(96, 32)
    )
    model.set_dtype(dtype)
    layer = model.layers[0]
    quantized.install(model, [], ROOM if keeps else 0)
    assert layer.product.dequantized_bytes == 96 * 64 * 2
    for tokens in (1, 5):
        assert layer(mx.zeros((tokens, 64), dtype)).dtype == dtype


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_blocks_of_weights_whose_scales_are_integers_are_fused(mode: str, kernels: None) -> None:
    fast, plain = (tiny_model("llama", seed=4) for _ in range(2))
    for model in (fast, plain):
        nn.quantize(model, mode=mode)
    attention.install(fast)
    products = cuda_block.install(fast)
    assert len(products) == 4 * len(fast.layers)
    quantized.install(fast, products, 0)
    assert solo_tokens(fast, [3, 9, 4] * 9, 12) == solo_tokens(plain, [3, 9, 4] * 9, 12)


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_a_quantized_model_gives_the_same_tokens(
    kind: TinyKind, keeps: bool, grouped: None, kernels: None
) -> None:
    """With fused blocks and without, and with an embedding as the output layer."""
    models = [tiny_model(kind, seed=4) for _ in range(2)]
    for model in models:
        nn.quantize(model, 32, 8)
    fast, plain = models
    attention.install(fast)
    quantized.install(fast, cuda_block.install(fast), ROOM if keeps else 0)
    CALLS.clear()  # those of the trials
    for prompt in ([5], [3, 9, 4] * 9):
        assert solo_tokens(fast, prompt, 12) == solo_tokens(plain, prompt, 12)
    assert bool(CALLS) != keeps


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_gives_the_same_tokens(
    kind: str, bits: int | None, grouped: None
) -> None:
    """Tokens are sorted by expert from 64 pairs on; fewer are in any order, or go to MLX."""
    models = [conformance_model(kind) for _ in range(2)]
    for model in models:
        if bits is not None:
            nn.quantize(model, 32, bits, class_predicate=lambda n, m: hasattr(m, "to_quantized"))
    fast, plain = models
    experts.install(fast)
    tokens = mx.array([[3 + (7 * n) % 50 for n in range(70)]])
    assert mx.allclose(fast(tokens), plain(tokens), atol=2e-3).item()
    each = 2  # experts of a token
    assert set(CALLS) == {each * 70}
    assert bool(TILED) == (bits is None)
    for count in (1, (MIN_LISTED - 1) // each, MIN_LISTED // each + 1, 31):
        CALLS.clear()
        few = tokens[:, :count]
        assert mx.allclose(fast(few), plain(few), atol=2e-3).item()
        assert set(CALLS) == ({each * count} if each * count >= MIN_LISTED else set())
    names = [dict(nn.utils.tree_flatten(model.parameters())).keys() for model in models]
    assert names[0] == names[1]


@given(
    shape=st.lists(st.integers(0, 5), max_size=2),
    each=st.integers(1, 5),
    shared=st.booleans(),
    are_sorted=st.booleans(),
    index_type=st.sampled_from([mx.uint32, mx.int32, mx.int64]),
)
@settings(deadline=None)
def test_pairs_of_any_form_get_the_products_of_their_experts(
    shape: list[int], each: int, shared: bool, are_sorted: bool, index_type: mx.Dtype
) -> None:
    """One row for a token or for each of its pairs, no tokens at all, and views of other arrays."""
    count, inputs, outputs = 3, 8, 6
    weights = Weights(mx.random.normal((count, outputs, inputs)))
    form = (int(np.prod(shape)) * each,) if are_sorted else (*shape, each)
    indices = mx.random.randint(0, count, form).astype(index_type)
    indices = mx.sort(indices) if are_sorted else indices
    rows = (*shape, 1) if shared and not are_sorted else form
    x = mx.random.normal((*rows, 1, 2 * inputs))[..., ::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "grouped_product", _grouped_product)
        patch.setattr(experts, "tiled_product", _tiled_product)
        y = ExpertProduct(weights)(x, indices, are_sorted)
    pairs = indices.size
    assert (y is not None) == (pairs > 0 if are_sorted else MIN_LISTED <= pairs <= MAX_LISTED)
    if y is not None:
        expected = x @ weights.weight[indices].swapaxes(-1, -2)
        assert y.shape == (*form, 1, outputs)
        assert mx.allclose(y, expected, atol=1e-5).item()


@given(
    shape=st.lists(st.integers(1, 40), max_size=2),
    each=st.integers(1, 4),
    count=st.integers(1, 9),
    biased=st.booleans(),
    bits=st.sampled_from([None, 4, 8]),
    other_type=st.booleans(),
)
@settings(deadline=None)
def test_an_mlp_of_experts_reads_tokens_where_they_are(
    shape: list[int], each: int, count: int, biased: bool, bits: int | None, other_type: bool
) -> None:
    """As mlx-lm's does, for tokens of any shape and type, few or many."""
    mlp = SwitchGLU(32, 64, count, bias=biased)
    if bits is not None:
        nn.quantize(mlp, 32, bits)
    x = mx.random.normal((*shape, 32)).astype(mx.float16 if other_type else mx.float32)
    indices = mx.random.randint(0, count, (*shape, each))
    expected = mlp(x, indices)
    with pytest.MonkeyPatch.context() as patch:
        _replace_kernels(patch)
        experts.install(nn.Sequential(mlp))
        y = mlp(x, indices)
    assert type(mlp) is experts.GroupedSwitchGLU
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    assert mx.allclose(y, expected, atol=2e-3).item()
    read_in_place = indices.size >= experts.MIN_SORTED and not other_type
    if read_in_place:
        assert [indices.size] * 3 == CALLS
    assert set(CALLS) <= {indices.size}


def test_experts_that_the_kernel_cannot_read_are_never_given_to_mlx_as_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = SwitchLinear(8, 6, 3, bias=True)
    model = nn.Sequential(layer)
    experts.install(model)
    given: list[bool] = []
    original = mx.gather_mm

    def gather(*arguments: Any, **more: Any) -> mx.array:
        given.append(more.get("sorted_indices", False))
        return original(*arguments, **more)

    monkeypatch.setattr(mx, "gather_mm", gather)
    x, own = mx.random.normal((5, 1, 8)), mx.array([0, 0, 1, 2, 2])
    y = layer(x, own, sorted_indices=True)
    expected = mx.stack(
        [x[n] @ layer.weight[e].T + layer.bias[e] for n, e in enumerate([0, 0, 1, 2, 2])]
    )
    assert mx.allclose(y, expected, atol=1e-5).item()
    assert given == [False]


@given(
    blocks=st.integers(1, 10**5),
    width=st.integers(1, 300).map(lambda n: 16 * n),
    light=st.booleans(),
    plain=st.booleans(),
)
def test_blocks_have_as_few_warps_as_fill_the_processors(
    blocks: int, width: int, light: bool, plain: bool
) -> None:
    warps, resident = block_of(blocks, width, light, plain)
    most, least = 16 if light else 10, 4 if plain else 2
    assert warps in (2, 4, 8)
    assert 1 <= resident <= most // warps
    assert warps == least or warps * 64 <= width, "each warp has something to read"
    assert warps == least or warps // 2 * blocks < most * 132, "half of them would not fill"


@pytest.mark.parametrize("mode", FORMS)
def test_experts_need_not_name_what_their_mode_has(mode: str) -> None:
    layer = SwitchLinear(64, 32, 2, bias=False).to_quantized(None, None, mode)
    weights = experts.weights_of(layer, mx.bfloat16)
    assert weights is not None
    assert weights.are_fit
    assert (weights.bits, weights.group) == FORMS[mode]
