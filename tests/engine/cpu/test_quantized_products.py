"""Products with quantized weights are those with the dequantized ones, whichever reads them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.weights import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import dequantize_model
from support.engine.kv import filled_batch
from support.engine.reference import logits_of_prompt

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import decode_attention, host_linear, kernels
from chairlift.engine.cpu.compiled import amx_matmul, quantized_matmul
from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix
from chairlift.engine.cpu.compiled.llvm import dot
from chairlift.engine.cpu.compiled.quantized_matmul import (
    DotExperts,
    DotMatrix,
    QuantizedExperts,
    QuantizedMatrix,
)
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.experts import HostQuantizedSwitchLinear, HostSwitchGLU, routes_of
from chairlift.engine.cpu.host_linear import HostQuantizedEmbedding, HostQuantizedLinear
from chairlift.engine.device import memory
from chairlift.engine.model.adapters import adapt

pytestmark = pytest.mark.skipif(
    not quantized_matmul.available(), reason="needs llvmlite (extra jit)"
)

# The relative error of a sum of terms that are added in float32, in any order.
TOLERANCE = 2.0**-20
# Both kernels, as far as this CPU has them.
MATRICES = [QuantizedMatrix, DotMatrix] if dot.compiled() else [QuantizedMatrix]
EXPERTS = [QuantizedExperts, DotExperts] if dot.compiled() else [QuantizedExperts]
FORMS = st.tuples(st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 128]))


def _quantized(form: tuple[int, int], *shape: int, seed: int = 0) -> Quantized:
    bits, group = form
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return Quantized(*mx.quantize(mx.array(numbers), group, bits), group, bits)


def _exact(weight: Quantized) -> np.ndarray[Any, np.dtype[np.float64]]:
    packed, scales, biases, group, bits = weight
    return np.array(mx.dequantize(packed, scales, biases, group, bits)).astype(np.float64)


def _assert_products(
    result: np.ndarray[Any, Any], x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]
) -> None:
    terms = np.abs(x).astype(np.float64) @ np.abs(weight).T
    # Scales and biases that cancel each other round in a weight of any size.
    largest = np.abs(weight).max() * np.abs(x).sum(axis=-1, keepdims=True)
    difference = np.abs(result - x.astype(np.float64) @ weight.T)
    assert np.all(difference <= TOLERANCE * (terms + largest))


@pytest.mark.parametrize("make", MATRICES)
@given(
    FORMS,
    st.lists(st.sampled_from([1, 31, 64, 100]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 9]),
    st.integers(0, 70),
)
@settings(deadline=None)
def test_products_of_layers_with_the_same_input(
    make: Callable[[list[Quantized]], CompiledMatrix],
    form: tuple[int, int],
    outputs: list[int],
    groups: int,
    tokens: int,
) -> None:
    """Any bits and groups; more inputs than the kernel multiplies at a time; panels not full."""
    inputs = groups * form[1]
    weights = [_quantized(form, count, inputs, seed=n) for n, count in enumerate(outputs)]
    matrix = make(weights)
    x = np.random.default_rng(7).normal(size=(tokens, inputs)).astype(np.float32)
    result = np.array(matrix(x))
    assert result.shape == (tokens, sum(outputs))
    _assert_products(result, x, np.concatenate([_exact(weight) for weight in weights]))
    for token in range(0, tokens, 13):
        alone = np.array(matrix(x[token : token + 1]))
        assert np.array_equal(result[token], alone[0]), "it depends on the tokens beside it"


@pytest.mark.parametrize("make", MATRICES)
@given(st.integers(0, 99), st.integers(-70, 90), st.integers(0, 20))
@settings(deadline=None)
def test_products_of_numbers_of_very_different_sizes(
    make: Callable[[list[Quantized]], CompiledMatrix], seed: int, exponent: int, spread: int
) -> None:
    """Groups of zeros, of tiny numbers, and of some that are far larger than the others."""
    rng, weight = np.random.default_rng(seed), _quantized((4, 32), 33, 128, seed=seed)
    x = rng.normal(size=(5, 128)) * 2.0 ** (rng.integers(-spread, spread + 1, (5, 128)) + exponent)
    x[rng.random(size=x.shape) < 0.2] = 0
    x[1, 32:64] = 0
    x = x.astype(np.float32)
    _assert_products(np.array(make([weight])(x)), x, _exact(weight))


@pytest.mark.parametrize("make", MATRICES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_spoils_its_own_token(
    make: Callable[[list[Quantized]], CompiledMatrix], number: float
) -> None:
    weight = _quantized((4, 64), 70, 192)
    matrix, x = make([weight]), np.ones((9, 192), np.float32)
    expected = np.array(matrix(x))
    x[4, 100] = number
    result = np.array(matrix(x))
    assert not np.isfinite(result[4]).any()
    others = [token for token in range(9) if token != 4]
    assert np.array_equal(result[others], expected[others])


@pytest.mark.skipif(not dot.compiled(), reason="needs a CPU that multiplies bytes")
@pytest.mark.parametrize("registers", [dot.Registers(8, 2), dot.Registers(16, 3)])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64), (8, 128), (6, 32)])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_other_registers_give_the_same_products(
    registers: dot.Registers, bits: int, group: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs without AVX-512 have half of the size; those without AMX have no tiles."""
    own = dot.compiled()
    assert own is not None
    if registers.lanes > own.lanes:
        pytest.skip("this CPU has no such registers")
    weight = _quantized((bits, group), 3, 41, groups * group)
    one = weight._replace(weight=weight.weight[1], scales=weight.scales[1], biases=weight.biases[1])
    x = np.random.default_rng(3).normal(size=(45, groups * group)).astype(np.float32)
    # One row, fewer than a tile has, and more.
    experts = np.array([[1, 0, 1], [0, 1, 7], [2, 8, 37]])
    expected = np.array(DotMatrix([one])(x)), np.array(DotExperts(weight)(x, experts))
    kernel = dot.compile_for(registers)
    assert kernel is not None
    monkeypatch.setattr(dot, "compiled", lambda: kernel)
    assert np.array_equal(expected[0], np.array(DotMatrix([one])(x)))
    assert np.array_equal(expected[1], np.array(DotExperts(weight)(x, experts)))


@pytest.mark.parametrize("make", EXPERTS)
@given(FORMS, st.lists(st.integers(0, 4), max_size=60), st.sampled_from([1, 31, 100]))
@settings(deadline=None)
def test_each_token_gets_its_own_experts_product(
    make: Callable[[Quantized], CompiledExperts],
    form: tuple[int, int],
    chosen: list[int],
    outputs: int,
) -> None:
    weight = _quantized(form, 5, outputs, 3 * form[1])
    own = np.array(chosen, np.uint32)
    x = np.random.default_rng(1).normal(size=(len(own), 3 * form[1])).astype(np.float32)
    order, groups = routes_of(own)
    result = np.empty((len(own), outputs), np.float32)
    result[order] = make(weight)(x[order], groups)
    exact = _exact(weight)
    for token, expert in enumerate(chosen):
        _assert_products(result[token : token + 1], x[token : token + 1], exact[expert])


def _models(name: str, **form: Any) -> tuple[Any, Any]:
    """A quantized model with compiled products, and the same model dequantized."""
    models = []
    for _ in range(2):
        model = tiny_model(name)
        nn.quantize(model, **{"group_size": 32, "bits": 4, **form})
        models.append(model)
    models[1].update(models[0].parameters())
    dequantize_model(models[1])
    assert kernels.install(models[0], exactly=True)
    return models[0], models[1]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_a_quantized_model_equals_the_dequantized_one(name: str, bits: int) -> None:
    model, reference = _models(name, bits=bits)
    kinds = {type(module) for module in model.modules()}
    assert not kinds & {nn.QuantizedLinear, nn.QuantizedEmbedding}
    assert HostQuantizedLinear in kinds
    if name in ("mixtral", "qwen3_moe"):
        assert kinds & {HostSwitchGLU, HostQuantizedSwitchLinear}
    ours, theirs = (logits_of_prompt(each, 41, 3) for each in (model, reference))
    scale = mx.abs(theirs).max().item()
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "gemma2", "glm4_moe", "gpt_oss", "lfm2", "mamba2", "phi3", "qwen3_next"],
)
def test_other_architectures_can_be_quantized(name: str) -> None:
    """Layers whose inputs are no multiple of a group are not."""

    def is_fit(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    models = [tiny_model(name) for _ in range(2)]
    for model in models:
        nn.quantize(model, group_size=32, bits=4, class_predicate=is_fit)
    models[1].update(models[0].parameters())
    dequantize_model(models[1])
    for model in models:
        adapt(model)
    accelerate(models[0])
    assert HostQuantizedLinear in {type(module) for module in models[0].modules()}
    ours, theirs = (logits_of_prompt(model, 41, 1) for model in models)
    scale = mx.abs(theirs).max().item()
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale).item()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_decode_steps_are_whole_layers_of_compiled_products(name: str) -> None:
    model, reference = _models(name)
    block = type(model.layers[0])
    decode_attention.install(model)
    assert all(type(layer) is not block for layer in model.layers)
    ours, theirs = (filled_batch(each, (3, 9, 1)) for each in (model, reference))
    rng = random.Random(1)
    for _ in range(10):
        tokens = mx.array([[rng.randrange(1, 20)] for _ in range(3)])
        logits = []
        for each, batch in ((model, ours), (reference, theirs)):
            with batch.step(1):
                logits.append(each(tokens, cache=batch.layers))
            mx.eval(logits[-1], batch.state)
        scale = mx.abs(logits[1]).max().item()
        assert mx.allclose(*logits, rtol=1e-3, atol=1e-4 * scale).item()


def test_layers_may_be_quantized_in_different_ways() -> None:
    """An attention's projections are one product then, of dequantized weights."""
    model = tiny_model("llama")
    reference = tiny_model("llama")
    for each in (model, reference):
        nn.quantize(
            each,
            group_size=32,
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized")
                and {"group_size": 32, "bits": 6 if path.endswith(("v_proj", "up_proj")) else 4}
            ),
        )
    reference.update(model.parameters())
    dequantize_model(reference)
    assert kernels.install(model, exactly=True)
    decode_attention.install(model)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert type(attention.v_proj) is nn.Linear
    assert type(attention.o_proj) is HostQuantizedLinear
    assert mlp.gate_proj.products is not mlp.up_proj.products
    ours, theirs = (logits_of_prompt(each, 41, 3) for each in (model, reference))
    scale = mx.abs(theirs).max().item()
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale).item()


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_layers_that_the_kernel_cannot_read_are_dequantized(mode: str) -> None:
    model = tiny_model("llama")
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    nn.quantize(model, group_size=group, bits=bits, mode=mode)
    expected = model(mx.array([[1, 5, 2]]))
    kernels.install(model, exactly=True)
    for module in model.modules():
        assert not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    scale = mx.abs(expected).max().item()
    assert mx.allclose(model(mx.array([[1, 5, 2]])), expected, rtol=0.02, atol=0.02 * scale).item()


def test_a_model_of_another_type_keeps_mlx_products() -> None:
    model = tiny_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.bfloat16)
    kernels.install(model, exactly=True)
    assert type(model.layers[0].mlp.up_proj) is nn.QuantizedLinear


def test_without_memory_for_copies_mlx_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 10)
    model = tiny_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    host_linear.install(model, exactly=True)
    assert type(model.layers[0].mlp.up_proj) is nn.QuantizedLinear


def test_a_tied_embedding_is_the_output_layer() -> None:
    embedding = nn.QuantizedEmbedding(100, 64, 32, 4)
    x = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    expected, rows = embedding.as_linear(x), embedding(mx.array([5, 99]))
    model = nn.Sequential(embedding)
    assert host_linear.install(model, exactly=True)
    assert isinstance(embedding, HostQuantizedEmbedding)
    assert mx.allclose(embedding.as_linear(x), expected, rtol=1e-4, atol=1e-4).item()
    assert mx.array_equal(embedding(mx.array([5, 99])), rows).item()


@pytest.mark.parametrize(
    ("compiled", "amx", "tiles", "size", "group", "kept"),
    [
        (False, False, False, 1, 64, False),
        (True, False, False, 1, 32, True),
        (True, True, True, 1, 32, False),
        (True, True, True, 9, 32, True),
        (True, True, True, 1, 64, True),
        (True, True, True, 1, 128, True),
        (True, True, False, 1, 64, False),
        (True, True, False, 9, 64, True),
    ],
)
def test_small_models_of_small_groups_are_dequantized_for_amx(
    compiled: bool,
    amx: bool,
    tiles: bool,
    size: int,
    group: int,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_matmul, "available", lambda: compiled)
    monkeypatch.setattr(quantized_matmul, "has_tiles", lambda: tiles)
    monkeypatch.setattr(amx_matmul, "available", lambda: amx)
    monkeypatch.setattr(memory, "free_memory", lambda: 100)
    assert kernels.keeps_quantized(size, group) is kept
