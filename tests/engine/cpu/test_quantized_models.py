"""Models with quantized weights compute what the same models do with dequantized ones."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from conformance.weights import tiny_model
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model
from support.engine.kv import filled_batch
from support.engine.reference import logits_of_prompt

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import experts, host_linear, kernels
from chairlift.engine.cpu.compiled import amx_matmul, quantized_matmul
from chairlift.engine.cpu.compiled.quantized_matmul import panel_bytes
from chairlift.engine.cpu.compiled.quantized_weight import Quantized
from chairlift.engine.cpu.decoder import install as decoder
from chairlift.engine.cpu.experts import HostQuantizedSwitchLinear, HostSwitchGLU
from chairlift.engine.cpu.host_linear import HostQuantizedEmbedding, HostQuantizedLinear
from chairlift.engine.device import memory
from chairlift.engine.model import dequantize
from chairlift.engine.model.adapters import adapt

pytestmark = pytest.mark.skipif(
    not quantized_matmul.available(), reason="needs llvmlite (extra jit)"
)


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


def _assert_equal(model: Any, reference: Any, has_experts: bool) -> None:
    """Asserts that compiled products take the place of MLX's, with the logits of the reference."""
    kinds = {type(module) for module in model.modules()}
    assert not kinds & {nn.QuantizedLinear, nn.QuantizedEmbedding}
    assert HostQuantizedLinear in kinds
    if has_experts:
        assert kinds & {HostSwitchGLU, HostQuantizedSwitchLinear}
    ours, theirs = (logits_of_prompt(each, 41, 3) for each in (model, reference))
    scale = mx.abs(theirs).max().item()
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_moe"])
def test_a_model_in_mxfp4_equals_the_dequantized_one(name: str) -> None:
    """The embedding becomes float32."""
    models = []
    for _ in range(2):
        model = tiny_model(name)
        nn.quantize(model, mode="mxfp4")
        models.append(model)
    model, reference = models
    reference.update(model.parameters())
    dequantize.dequantize_model(reference)
    assert kernels.install(model, exactly=True)
    _assert_equal(model, reference, has_experts=name != "llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "nemotron_h", "llama4", "granitemoe"),
        *("phimoe", "glm4_moe", "jamba", "lfm2_moe"),
    ],
)
@pytest.mark.parametrize("form", [{"group_size": 32, "bits": 4}, {"mode": "mxfp4"}], ids=str)
def test_experts_whose_weights_are_released(
    name: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is memory for one copy only, the model has no other than the kernel's."""
    model, kept = tiny_model(name), tiny_model(name)
    for each in (model, kept):
        nn.quantize(each, class_predicate=lambda _, m: type(m) is SwitchLinear, **form)
    kept.update(model.parameters())
    layers = [m for m in model.modules() if isinstance(m, QuantizedSwitchLinear)]
    assert layers
    size = sum(panel_bytes(weight) for m in layers if (weight := Quantized.of(m)) is not None)
    assert experts.install(kept, exactly=True)
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * size - 1)
    assert experts.install(model, exactly=True)
    arrays = [m[name] for m in layers for name in ("weight", "scales", "biases") if name in m]
    assert not any(array.size for array in arrays)
    assert not any(
        m.weight.size == 0 for m in kept.modules() if isinstance(m, QuantizedSwitchLinear)
    )
    assert mx.array_equal(*(logits_of_prompt(each, 41, 3) for each in (model, kept))).item()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_a_quantized_model_equals_the_dequantized_one(name: str, bits: int) -> None:
    model, reference = _models(name, bits=bits)
    _assert_equal(model, reference, has_experts=name in ("mixtral", "qwen3_moe"))


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
    decoder.install(model)
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
    decoder.install(model)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert type(attention.v_proj) is nn.Linear
    assert type(attention.o_proj) is HostQuantizedLinear
    assert mlp.gate_proj.products is not mlp.up_proj.products
    ours, theirs = (logits_of_prompt(each, 41, 3) for each in (model, reference))
    scale = mx.abs(theirs).max().item()
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale).item()


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_layers_that_the_kernel_cannot_read_are_dequantized(mode: str) -> None:
    model = tiny_model("llama")
    group, bits = {"mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    nn.quantize(model, group_size=group, bits=bits, mode=mode)
    expected = model(mx.array([[1, 5, 2]]))
    kernels.install(model, exactly=True)
    for module in model.modules():
        assert not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    scale = mx.abs(expected).max().item()
    assert mx.allclose(model(mx.array([[1, 5, 2]])), expected, rtol=0.02, atol=0.02 * scale).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_a_model_of_another_type_keeps_mlx_products(mode: str, name: str, dtype: mx.Dtype) -> None:
    model = tiny_model(name)
    nn.quantize(model, group_size=32 if mode == "affine" else None, mode=mode)
    model.set_dtype(dtype)
    tokens = mx.array([[1, 5, 2]])
    expected = model(tokens).dtype
    before = {path: (type(layer), layer.weight) for path, layer in _quantized_layers(model)}
    kernels.install(model, exactly=True)
    after = dict(_quantized_layers(model))
    assert after.keys() == before.keys()
    for path, (kind, weight) in before.items():
        assert type(after[path]) is kind
        assert after[path].weight is weight
    assert model(tokens).dtype == expected


def _quantized_layers(model: Any) -> list[tuple[str, Any]]:
    return [(path, layer) for path, layer in model.named_modules() if "scales" in layer]


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
