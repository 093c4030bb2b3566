"""Adapters of every linear layer, in architectures with experts, latent attention and states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from support.engine.adapters import matrices, write_mlx, write_peft
from support.engine.bench import Bench
from support.engine.reference import solo_tokens

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import host_linear
from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.graph.layer import GraphLayer
from chairlift.engine.lora.low_rank import is_linear
from chairlift.engine.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from chairlift.engine.model.adapters import adapt

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 9, 11, 12, 1, 2], [7]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "falcon_h1"])
def test_mixed_rows_get_mlx_lms_tokens(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    linear = {key for key, layer in model.named_modules() if is_linear(layer)} - {"lm_head"}
    pairs = matrices(model, 1, suffixes=("",), is_changed=linear.__contains__, size=0.1)
    folder = write_mlx(tmp_path, pairs)
    base = [solo_tokens(tiny_model(name), prompt, 5) for prompt in PROMPTS]
    reference = load_adapters(tiny_model(name), str(folder))
    adapted = [solo_tokens(reference, prompt, 5) for prompt in PROMPTS]
    assert base != adapted
    bench = Bench(model)
    loaded = bench.core.load_adapter(LoadAdapter("a", str(folder)))
    assert isinstance(loaded, AdapterLoaded), loaded
    for number, prompt in enumerate(PROMPTS):
        bench.submit(f"base {number}", prompt, 5)
        bench.submit(f"adapted {number}", prompt, 5, reading={"adapter": "a"})
    bench.drain()
    assert [bench.tokens(f"base {number}") for number in range(len(PROMPTS))] == base
    assert [bench.tokens(f"adapted {number}") for number in range(len(PROMPTS))] == adapted


@pytest.mark.skipif(not kernel.available(), reason="needs the extra jit")
@pytest.mark.parametrize("least", [0, host_linear.MIN_WEIGHTS])
@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2", "olmo2", "qwen3_next"])
def test_layers_with_graphs_add_adapters(
    name: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs know neither the products of host layers' adapters nor those of MLX's layers.

    They are traced before the adapter is loaded, for as many rows as have it afterwards.
    """
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", least)
    folder = write_mlx(tmp_path, matrices(tiny_model(name), 1, size=0.3))
    base = [solo_tokens(tiny_model(name), prompt, 5) for prompt in PROMPTS]
    reference = load_adapters(tiny_model(name), str(folder))
    adapted = [solo_tokens(reference, prompt, 5) for prompt in PROMPTS]
    assert all(one != other for one, other in zip(base, adapted, strict=True))
    model = tiny_model(name)
    adapt(model)
    bench = Bench(model, eager=accelerate(model).eager)
    assert all(isinstance(layer.graph, GraphLayer) for layer in model.layers)

    def tokens(rows: list[int], adapter: str) -> list[list[int]]:
        names = [f"{adapter} {number} of {rows}" for number in rows]
        for number, request in zip(rows, names, strict=True):
            bench.submit(request, PROMPTS[number], 5, reading={"adapter": adapter})
        bench.drain()
        return [bench.tokens(request) for request in names]

    batches = [[0], [1, 2], [0, 1, 2]]
    for adapter, expected in (("", base), ("a", adapted), ("", base)):
        if adapter:
            loaded = bench.core.load_adapter(LoadAdapter(adapter, str(folder)))
            assert isinstance(loaded, AdapterLoaded), loaded
        for rows in batches:
            assert tokens(rows, adapter) == [expected[number] for number in rows]
        bench.outputs.clear()


def test_layers_of_experts_and_the_output_layer_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    bench = Bench(model)
    pairs = matrices(tiny_model("llama"), 1, suffixes=("layers.0.self_attn.q_proj",))
    for name in ("model.layers.0.mlp.switch_mlp.up_proj", "lm_head", "model.embed_tokens"):
        folder = write_mlx(tmp_path / name, dict.fromkeys([name], next(iter(pairs.values()))))
        failed = bench.core.load_adapter(LoadAdapter("a", str(folder)))
        assert isinstance(failed, AdapterFailed)
        assert f"no linear layer '{name}' that an adapter could change" in failed.message


@pytest.mark.parametrize("size", [0.0, 0.1])
def test_layers_without_effect_may_be_missing_in_the_model(size: float, tmp_path: Path) -> None:
    """Layers that share the keys of others; checkpoints and adapters have projections for them."""
    model = tiny_model("gemma3n")
    pairs = matrices(model, 1, suffixes=("k_proj", "o_proj"), size=0.1)
    used = {name for name in pairs if "k_proj" not in name or re.search(r"layers\.[01]\.", name)}
    reference = load_adapters(
        tiny_model("gemma3n"), str(write_mlx(tmp_path / "used", {n: pairs[n] for n in used}))
    )
    unused = {name: (a, b * size) for name, (a, b) in pairs.items() if name not in used}
    missing = {name.replace("k_proj", "x_proj"): both for name, both in unused.items()}
    bench = Bench(model)
    for name, more in (("unused", unused), ("missing", missing)):
        folder = write_mlx(tmp_path / name, {n: pairs[n] for n in used} | more)
        loaded = bench.core.load_adapter(LoadAdapter(name, str(folder)))
        assert isinstance(loaded, AdapterFailed if size else AdapterLoaded), loaded
        if not size:
            bench.submit(name, PROMPTS[0], 5, reading={"adapter": name})
            bench.drain()
            assert bench.tokens(name) == solo_tokens(reference, PROMPTS[0], 5)


def test_pefts_adapters_get_the_factors_that_a_models_loading_multiplies_into_weights(
    tmp_path: Path,
) -> None:
    """PEFT's change a checkpoint's weights, mlx-lm's those of the loaded model."""
    linear = matrices(tiny_model("falcon_h1"), 1, suffixes=("proj",), size=0.3)
    checkpoint = dict(tree_flatten(tiny_model("falcon_h1").parameters()))
    for name, weight in checkpoint.items():
        if "conv1d.weight" in name:
            checkpoint[name] = weight.transpose(0, 2, 1)

    def loaded(changes: dict[str, tuple[mx.array, mx.array]]) -> Any:
        model = tiny_model("falcon_h1")
        weights = {name: mx.array(weight) for name, weight in checkpoint.items()}
        for name, (a, b) in changes.items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + (a @ b).T
        model.update(tree_unflatten(list(model.sanitize(weights).items())))
        return model

    base = loaded({})
    bench = Bench(base)
    mlx = write_mlx(tmp_path / "mlx", linear)
    expected = {"peft": loaded(linear), "mlx": load_adapters(loaded({}), str(mlx))}
    write_peft(tmp_path / "peft", linear)
    for name, alone in expected.items():
        answer = bench.core.load_adapter(LoadAdapter(name, str(tmp_path / name)))
        assert isinstance(answer, AdapterLoaded), answer
        bench.submit(name, PROMPTS[1], 8, reading={"adapter": name})
        bench.drain()
        assert bench.tokens(name) == solo_tokens(alone, PROMPTS[1], 8)
    assert bench.tokens("peft") != bench.tokens("mlx")
