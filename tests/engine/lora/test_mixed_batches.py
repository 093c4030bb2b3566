"""Rows of different adapters in one batch get the tokens that each gets alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.tuner.utils import load_adapters
from support.engine.adapters import matrices, write_mlx, write_peft
from support.engine.bench import Bench
from support.engine.reference import solo_tokens
from support.engine.swap import squeeze
from support.tiny import TinyKind, tiny_config, tiny_model

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import host_linear, matrix
from chairlift.engine.cpu.compiled import quantized_matmul
from chairlift.engine.messages import Abort, AdapterFailed, AdapterLoaded, LoadAdapter

ADAPTERS = 8
KINDS: list[TinyKind] = ["llama", "qwen3", "gemma3", "lfm2"]


def _model(kind: TinyKind, quantized: bool = False) -> Any:
    model = tiny_model(kind, seed=3)
    if quantized:
        nn.quantize(model, group_size=32, bits=8)
    return model


def _folders(path: Path, model: Any, count: int = ADAPTERS) -> list[Path]:
    """Adapters of different ranks, layers and formats."""
    return [
        (write_peft if number % 2 else write_mlx)(path / str(number), _matrices(model, number))
        for number in range(count)
    ]


def _matrices(model: Any, number: int) -> Any:
    suffixes = ("proj",) if number % 3 else ("q_proj", "v_proj", "down_proj", "w2")
    return matrices(model, number, rank=2 + number % 4, suffixes=suffixes)


def _load(bench: Bench, folders: list[Path]) -> None:
    for number, folder in enumerate(folders):
        loaded = bench.core.load_adapter(LoadAdapter(f"a{number}", str(folder)))
        assert isinstance(loaded, AdapterLoaded), loaded


def _expected(
    path: Path, kind: TinyKind, quantized: bool, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """The tokens of mlx-lm, with each of its adapters alone; the last prompt has none."""
    expected = []
    for number, prompt in enumerate(prompts):
        alone = _model(kind, quantized)
        if number < ADAPTERS:
            folder = write_mlx(path / f"mlx{number}", _matrices(alone, number))
            alone = load_adapters(alone, str(folder))
        expected.append(solo_tokens(alone, prompt, count))
    return expected


def _prompts(seed: int = 1) -> list[list[int]]:
    random_ = random.Random(seed)
    lengths = [3, 30, 7, 1, 61, 12, 5, 20, 9]
    return [[random_.randrange(3, 250) for _ in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantized"), [*((kind, False) for kind in KINDS), ("llama", True)]
)
def test_rows_of_eight_adapters_and_none_get_the_tokens_of_each_alone(
    kind: TinyKind, quantized: bool, tmp_path: Path
) -> None:
    model = _model(kind, quantized)
    bench = Bench(model, rows=6, tokens=24, swap=1 << 20, bands=2)
    _load(bench, _folders(tmp_path, model))
    prompts, count, turns = _prompts(2), 6, 2 if kind == "llama" else 1
    expected = _expected(tmp_path, kind, quantized, prompts, count)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    # Requests join while others decode, and one leaves early.
    for turn in range(turns):
        for number, prompt in enumerate(prompts):
            adapter = f"a{number}" if number < ADAPTERS else ""
            name = f"{turn}-{number}"
            bench.submit(name, prompt, count, reading={"adapter": adapter})
            bench.step()
        bench.submit(f"leaves-{turn}", [9, 8, 7], 40, reading={"adapter": "a1"})
        for _ in range(5):
            bench.step()
        bench.core.abort(Abort(f"leaves-{turn}"))
    bench.drain()
    for turn in range(turns):
        assert [bench.tokens(f"{turn}-{n}") for n in range(len(prompts))] == expected


@pytest.mark.slow
@pytest.mark.parametrize("swap", [0, 1 << 24])
def test_preempted_rows_continue_with_their_adapter(swap: int, tmp_path: Path) -> None:
    model = _model("llama")
    bench = Bench(model, swap=swap)
    _load(bench, _folders(tmp_path, model))
    prompts, count = _prompts()[:6], 14
    expected = _expected(tmp_path, "llama", False, prompts, count)
    for number, prompt in enumerate(prompts):
        bench.submit(str(number), prompt, count, reading={"adapter": f"a{number}"})
    for _ in range(7):
        bench.step()
    for _ in range(5):
        squeeze(bench, 2)
    bench.drain()
    assert sum(stats.preemptions for stats in bench.stats) > 0
    assert [bench.tokens(str(n)) for n in range(len(prompts))] == expected


def test_rows_without_an_adapter_are_identical_to_those_of_a_server_without_any(
    tmp_path: Path,
) -> None:
    model = _model("llama")
    plain, adapted = Bench(_model("llama")), Bench(model)
    _load(adapted, _folders(tmp_path, model))
    for bench in (plain, adapted):
        for number, prompt in enumerate(_prompts()):
            bench.submit(str(number), prompt, 6, logprobs=4)
        bench.drain()
    # To the last bit.
    assert _tokens_and_logprobs(plain) == _tokens_and_logprobs(adapted)


def _tokens_and_logprobs(bench: Bench) -> Any:
    return {
        choice: [(output.token_ids, output.logprobs) for output in outputs]
        for choice, outputs in bench.outputs.items()
    }


def test_choices_of_a_request_have_its_adapter(tmp_path: Path) -> None:
    model = _model("llama")
    bench = Bench(model)
    _load(bench, _folders(tmp_path, model, 2))
    bench.submit("one", [5, 6, 7], 8, reading={"adapter": "a1"})
    bench.submit("many", [5, 6, 7], 8, n=3, reading={"adapter": "a1"})
    bench.drain()
    assert [bench.tokens("many", index) for index in range(3)] == [bench.tokens("one")] * 3


def test_adapters_never_share_prefixes_but_an_adapter_reuses_its_own(tmp_path: Path) -> None:
    model = _model("llama")
    first, second = _folders(tmp_path, model, 2)
    directory = tmp_path / "prefixes"
    bench = Bench(model, prefix=1 << 24, directory=directory)
    _load(bench, [first, second])
    prompt = _prompts()[4]
    expected = _expected(tmp_path, "llama", False, [prompt, prompt], 8)
    expected.append(solo_tokens(_model("llama"), prompt, 8))
    for turn in range(2):
        for number, adapter in enumerate(("a0", "a1", "")):
            name = f"{turn}{adapter}"
            bench.submit(name, prompt, 8, reading={"adapter": adapter})
            bench.drain()
            assert bench.tokens(name) == expected[number]
            cached = bench.outputs[name, 0][0].cached_tokens
            assert cached == (len(prompt) - 1 if turn else 0)
    # The same name with other weights finds nothing, in memory or on disk.
    bench.core.unload_adapter("a0")
    assert isinstance(bench.core.load_adapter(LoadAdapter("a0", str(second))), AdapterLoaded)
    bench.submit("other", prompt, 8, reading={"adapter": "a0"})
    bench.drain()
    assert bench.tokens("other") == expected[1]
    assert bench.outputs["other", 0][0].cached_tokens == len(prompt) - 1  # those of a1's weights
    bench.core.close(5.0)
    # Another engine finds them on disk by the weights, whatever the adapter's key is.
    again = Bench(_model("llama"), prefix=1 << 24, directory=directory)
    for key, folder, at in (("x", second, 1), ("y", first, 0)):
        assert isinstance(again.core.load_adapter(LoadAdapter(key, str(folder))), AdapterLoaded)
        again.submit(key, prompt, 8, reading={"adapter": key})
        again.drain()
        assert again.tokens(key) == expected[at]
        assert again.outputs[key, 0][0].cached_tokens > 0


def test_loading_and_unloading_changes_no_other_row(tmp_path: Path) -> None:
    model = _model("qwen3")
    bench = Bench(model)
    folders = _folders(tmp_path, model, 3)
    prompts = _prompts()[:3]
    expected = _expected(tmp_path, "qwen3", False, prompts, 20)
    _load(bench, folders[:1])
    bench.submit("0", prompts[0], 20, reading={"adapter": "a0"})
    for _ in range(5):
        bench.step()
    assert isinstance(bench.core.load_adapter(LoadAdapter("a1", str(folders[1]))), AdapterLoaded)
    bench.submit("1", prompts[1], 20, reading={"adapter": "a1"})
    for _ in range(3):
        bench.step()
    bench.core.unload_adapter("a0")  # refused while its row is running
    bench.drain()
    bench.core.unload_adapter("a0")
    bench.submit("gone", prompts[0], 4, reading={"adapter": "a0"})
    assert isinstance(bench.core.load_adapter(LoadAdapter("a2", str(folders[2]))), AdapterLoaded)
    bench.submit("2", prompts[2], 20, reading={"adapter": "a2"})
    bench.submit("again", prompts[1], 20, reading={"adapter": "a1"})
    bench.drain()
    assert [bench.tokens(name) for name in "012"] == expected
    assert bench.tokens("again") == expected[1]
    (refused,) = bench.outputs["gone", 0]
    assert refused.finish == "error"
    assert "not loaded" in (refused.error or "")


def _wide(layers: str) -> Any:
    """A model whose layers the CPU computes without MLX: "fused", "quantized" or "plain" ones."""
    config = tiny_config("llama", vocab_size=259) | {
        **{"hidden_size": 256, "intermediate_size": 320, "head_dim": 64},
        "num_key_value_heads": 4,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.random.seed(2)
    model.apply(lambda w: mx.random.normal(w.shape) / w.shape[-1] ** 0.5 * 1.5)
    if layers == "fused":
        model.apply(lambda w: w.astype(mx.bfloat16).astype(mx.float32))
    if layers == "quantized":
        nn.quantize(model, group_size=64, bits=8)
    mx.eval(model.parameters())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["fused", "quantized", "plain"])
def test_the_cpus_faster_layers_add_adapters(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and quantized layers have host products; the others are MLX's, in an eager model."""
    if layers == "fused" and not matrix.backends():
        pytest.skip("this machine has no fast BLAS")
    if layers == "quantized" and not quantized_matmul.available():
        pytest.skip("needs llvmlite (extra jit)")
    if layers == "plain":
        monkeypatch.setattr(host_linear, "backends", list)

    model = _wide(layers)
    pairs = [matrices(model, n, 3 + n, ("proj",) if n else ("v_proj",)) for n in range(3)]
    eager = accelerate(model).eager
    assert eager
    bench = Bench(model, eager=eager, tokens=200)
    _load(bench, [write_mlx(tmp_path / str(n), one) for n, one in enumerate(pairs)])
    # A prompt of more tokens than a small batch is computed by MLX.
    prompts = [*_prompts()[:3], [5] * 100]
    expected = []
    for number, prompt in enumerate(prompts):
        alone = _wide(layers)
        if number < len(pairs):
            alone = load_adapters(alone, str(tmp_path / str(number)))
        expected.append(solo_tokens(alone, prompt, 10))
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            reading = {"adapter": f"a{number}" if number < len(pairs) else ""}
            bench.submit(f"{turn}{number}", prompt, 10, reading=reading)
    bench.drain()
    for turn in range(2):
        assert [bench.tokens(f"{turn}{n}") for n in range(len(prompts))] == expected


@pytest.mark.slow
@pytest.mark.skipif(not quantized_matmul.available(), reason="needs llvmlite (extra jit)")
def test_steps_without_adapters_keep_their_compiled_layers(tmp_path: Path) -> None:
    """After steps in which rows had an adapter of one layer only."""
    model = _wide("quantized")
    bench = Bench(model, eager=accelerate(model).eager)
    pairs = matrices(model, 1, is_changed=lambda name: ".1." in name)
    _load(bench, [write_mlx(tmp_path, pairs)])
    reference = load_adapters(_wide("quantized"), str(tmp_path))
    prompts = _prompts()[:3]
    for name, alone in (("a0", reference), ("", _wide("quantized"))):
        for number, prompt in enumerate(prompts):
            bench.submit(f"{name}{number}", prompt, 8, reading={"adapter": name})
        bench.drain()
        for number, prompt in enumerate(prompts):
            assert bench.tokens(f"{name}{number}") == solo_tokens(alone, prompt, 8)
    assert all(layer.host.step(len(prompts)) is not None for layer in model.layers)


def test_a_layer_that_does_not_compute_all_tokens_is_refused_by_name(tmp_path: Path) -> None:
    model = _model("llama")
    (first, *_) = model.layers
    original: Any = type(first.mlp)

    def skips(self: Any, x: mx.array) -> mx.array:
        self.up_proj(x[:, :1])
        result: mx.array = original.__call__(self, x)
        return result

    first.mlp.__class__ = type(original.__name__, (original,), {"__call__": skips})
    bench = Bench(model)
    # Rows and chunks are one token each in packed calls, so only a plain call shows the fault.
    bench.core.pipeline.forward.packs = False
    folder = write_mlx(tmp_path, matrices(model, 1))
    failed = bench.core.load_adapter(LoadAdapter("x", str(folder)))
    assert isinstance(failed, AdapterFailed)
    assert "layers.0.mlp.up_proj" in failed.message
    bench.submit("still serves", [5, 6, 7], 4)
    bench.drain()
    assert len(bench.tokens("still serves")) == 4
