"""Decoder layers of many forms, computed by the steps of their graph and by their code."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conformance.configs import tiny_args, tiny_config
from conformance.values import VALUES
from conformance.weights import randomize, tiny_model
from mlx_lm.models.mla import MultiLinear

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.packed.step import BatchStep, packed
from chairlift.cache.quantized import HalfPrecision, Quantization, Storage
from chairlift.cache.speculation import Speculation
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu import host_linear
from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.compiled.row_attention import AttentionJobs
from chairlift.engine.cpu.graph import compiled_operations
from chairlift.engine.cpu.graph import layer as graph_layer
from chairlift.engine.model import split
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.recorder import observed

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs the extra jit")

# Attention with biases, sinks, windows, partial and traditional rotation or none; norms of other
# kinds and in other places; products that share an input under other names; experts; convolutions
# and states, also beside keys and values in one layer; latent attention; capped scores; keys and
# values of another layer, and inputs and results in several arrays.
FORMS = [
    "afm7",
    "baichuan_m1",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "falcon_h1",
    "gemma2",
    "gemma3n",
    "gemma4_text",
    "glm4_moe_lite",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba",
    "mamba2",
    "minicpm3",
    "ministral3",
    "mistral4",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "rwkv7",
    "smollm3",
    "stablelm",
    "starcoder2",
]
Contexts = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _all_products_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a layer was computed by its steps."""
    calls: list[bool] = []
    original = graph_layer.GraphLayer.__call__

    def counted(layer: Any, x: mx.array, given: Any) -> mx.array | None:
        result = original(layer, x, given)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(graph_layer.GraphLayer, "__call__", counted)
    return calls


def _model(name: str) -> Any:
    model = tiny_model(name)
    adapt(model)
    accelerate(model)
    return model


def _latent_model(sizes: Mapping[str, int], quantized: bool) -> Any:
    module, _ = tiny_args("deepseek_v3")
    config = tiny_config("deepseek_v3") | sizes
    model = randomize(module.Model(module.ModelArgs.from_dict(config)), 0)
    if quantized:
        nn.quantize(model, 32, 4, class_predicate=lambda _, layer: type(layer) is MultiLinear)
    adapt(model)
    accelerate(model)
    split.install(model)
    return model


def _filled(
    model: Any, lengths: list[int], seed: int, storage: Storage | None = None
) -> BatchCache:
    """A batch whose rows have these numbers of tokens."""
    batch = make_batch(model, storage)
    rng = random.Random(seed)
    for length in lengths:
        prompt = make_batch(model, storage)
        prompt.join(columns=length)
        tokens = mx.array([[rng.randrange(1, 20) for _ in range(length)]])
        with prompt.step(length):
            mx.eval(model(tokens, cache=prompt.layers))
        batch.join(prompt.extract(0), columns=length + 12)
    return batch


def _leave(batch: BatchCache, row: int) -> None:
    batch.leave([row])
    mx.eval(batch.take_moves())


def _decoded(model: Any, batch: BatchCache, context: Contexts, tokens: mx.array) -> Any:
    """The logits of a step for each of ``tokens``, ``[steps, rows]``, and the state afterwards."""
    logits = []
    for step in tokens:
        with context(), batch.step(1):
            logits.append(model(step[:, None], cache=batch.layers))
            mx.eval(logits[-1], [layer.state for layer in batch.layers])
    return np.array(mx.stack(logits))


@pytest.mark.parametrize("name", FORMS)
def test_steps_compute_what_the_code_does(name: str, steps: list[bool]) -> None:
    model = _model(name)
    lengths = [3, 1, 9, 17]
    tokens = mx.random.randint(1, 20, (8, len(lengths)), key=mx.random.key(0))
    one, other = (_filled(model, lengths, 1) for _ in range(2))
    steps.clear()
    ours = _decoded(model, one, nullcontext, tokens)
    used = steps.count(True)
    theirs = _decoded(model, other, observed, tokens)
    assert used == 8 * sum(hasattr(layer, "graph") for layer in model.layers) > 0
    assert steps.count(True) == used
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))


@pytest.mark.parametrize(
    "name",
    [
        *("falcon_h1", "gemma2", "gemma3n", "gemma4_text", "gpt_oss", "lfm2", "olmo2", "phi3"),
        "qwen3_next",
    ],
)
def test_rows_join_and_leave_between_steps(name: str) -> None:
    model = _model(name)
    results = []
    for context in (nullcontext, observed):
        batch, logits = _filled(model, [4, 7], 2), []
        for number, rows in enumerate((2, 3, 3, 2, 1)):
            if rows > len(batch):
                prompt = _filled(model, [5], 3)
                batch.join(prompt.extract(0), columns=20)
            while rows < len(batch):
                _leave(batch, 0)
            tokens = mx.random.randint(1, 20, (1, rows), key=mx.random.key(number))
            logits.append(_decoded(model, batch, context, tokens).reshape(rows, -1))
        results.append(np.concatenate(logits))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3 * float(np.abs(results[0]).max()))


@pytest.mark.parametrize("name", FORMS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Products of weights that no compiled function reads may differ in the last bits."""
    model = _model(name)
    lengths = [6, 11, 2]  # the last row takes the place of one that leaves
    tokens = mx.random.randint(1, 20, (4, len(lengths)), key=mx.random.key(4))
    together = _decoded(model, _filled(model, lengths, 5), nullcontext, tokens)
    batch = _filled(model, lengths, 5)
    _leave(batch, 0)
    _leave(batch, 0)
    alone = _decoded(model, batch, nullcontext, tokens[:, 1:2])
    bound = 1e-5 * float(np.abs(together).max())
    np.testing.assert_allclose(together[:, 1:2], alone, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "name",
    ["cohere2", "gemma2", "gemma3n", "gemma4_text", "gpt_oss", "olmo2", "phi3", "qwen3_moe"],
)
def test_rows_with_drafts_of_any_lengths(name: str, steps: list[bool]) -> None:
    """With windows and without; the code of a layer that caps scores is called part by part."""
    model, rng = _model(name), random.Random(6)
    splits = name == "gemma2"
    if splits:
        split.install(model)
    batches = [_filled(model, [3, 9, 1], 6) for _ in range(2)]
    for _ in range(6):
        counts = [rng.choice([1, 1, 2, 5, 11]) for _ in range(3)]
        kept = [rng.randint(1, count) for count in counts]
        fed = mx.array([[rng.randrange(1, 20)] for _ in range(sum(counts))])
        logits = []
        for batch, context in zip(batches, (nullcontext, observed), strict=True):
            draft = Speculation(batch)
            steps.clear()
            step = BatchStep(batch, counts, counts, draft.step)
            with context(), packed([step], splits) as layers:
                logits.append(np.array(model(fed, cache=layers)))
            assert all(steps) == (context is nullcontext) or not steps
            draft.commit(kept)
        bound = 1e-3 * float(np.abs(logits[1]).max())
        np.testing.assert_allclose(*logits, rtol=1e-3, atol=bound)


@pytest.mark.parametrize("storage", [HalfPrecision(), Quantization(8, 32)], ids=["half", "codes"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3n", "gemma4_text"])
def test_keys_in_fewer_bits(
    name: str, storage: Storage, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capped scores, and keys that another layer has written."""
    monkeypatch.setitem(VALUES, "head_dim", 32)
    model, lengths = _model(name), [3, 1, 17]
    tokens = mx.random.randint(1, 20, (4, len(lengths)), key=mx.random.key(1))
    one, other = (_filled(model, lengths, 1, storage) for _ in range(2))
    steps.clear()
    ours = _decoded(model, one, nullcontext, tokens)
    assert all(steps)
    theirs = _decoded(model, other, observed, tokens)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))


# Sizes of heads that compiled functions read.
WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(("sizes", "quantized"), [({}, False), (WIDE, False), (WIDE, True)])
def test_latent_attention_of_rows_with_drafts(
    sizes: Mapping[str, int], quantized: bool, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _latent_model(sizes, quantized)
    used: list[bool] = []
    original = AttentionJobs.point

    def counted(jobs: Any, step: Any) -> bool:
        used.append(original(jobs, step))
        return used[-1]

    monkeypatch.setattr(AttentionJobs, "point", counted)
    batches = [_filled(model, [3, 1, 140], 1) for _ in range(2)]
    steps.clear()
    for counts, kept in (([1, 4, 2], [1, 2, 2]), ([1, 1, 1], [1, 1, 1])):
        fed = mx.random.randint(1, 20, (sum(counts), 1), key=mx.random.key(len(used)))
        logits = []
        for batch, context in zip(batches, (nullcontext, observed), strict=True):
            draft = Speculation(batch)
            step = BatchStep(batch, counts, counts, draft.step)
            with context(), packed([step], splits=True) as layers:
                logits.append(np.array(model(fed, cache=layers)))
            draft.commit(kept)
        np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-3 * float(np.abs(logits[1]).max()))
    assert steps.count(True) == 2 * len(model.layers)
    assert used == [True] * (2 * len(model.layers) if sizes else 0)


@pytest.mark.parametrize("storage", [HalfPrecision(), Quantization(8, 32)])
def test_latents_that_are_stored_in_another_form(storage: Storage, steps: list[bool]) -> None:
    model = _latent_model(WIDE, quantized=False)
    tokens = mx.random.randint(1, 20, (3, 2), key=mx.random.key(0))
    one, other = (_filled(model, [5, 40], 1, storage) for _ in range(2))
    steps.clear()
    ours = _decoded(model, one, nullcontext, tokens)
    assert steps == [True] * 3 * len(model.layers)
    theirs = _decoded(model, other, observed, tokens)
    np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(np.abs(theirs).max()))


def test_an_adapter_is_computed_by_the_code(steps: list[bool]) -> None:
    """The steps have no additions to products."""
    model = _model("phi3")

    class Added:
        applies = True

    model.layers[1].graph.additions = [Added()]
    for applies in (True, False):
        Added.applies = applies
        batch = _filled(model, [3], 0)
        steps.clear()
        _decoded(model, batch, nullcontext, mx.array([[5]]))
        assert steps == [True, not applies, True, True]


@pytest.mark.parametrize("name", ["deepseek_v32", "plamo"])
def test_layers_whose_graph_does_not_show_all_keep_their_code(name: str) -> None:
    """Chosen tokens, keys that are changed again."""
    model = _model(name)
    assert not any(hasattr(layer, "graph") for layer in model.layers)


def test_layers_with_other_results_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial compares the logits."""
    wrong = compiled_operations._MAPS | {"Add": "subtract"}
    monkeypatch.setattr(compiled_operations, "_MAPS", wrong)
    model = _model("olmo2")
    assert not any("changed" in type(layer).__call__.__qualname__ for layer in model.layers)
