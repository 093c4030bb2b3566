"""Compiled decode steps, with traceable kernels instead of CUDA's."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.engine.core import build_core
from support.engine.on_cuda import (
    ON_CUDA,
    TRACES,
    ComparedSteps,
    _decode,
    decode_in_trace,
    on_cuda,
    traceable,
)
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.core import EngineCore
from chairlift.engine.cuda import attention as cuda_attention
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.attention import names_of
from chairlift.engine.model.compiled import MAX_SHAPES, STEADY, CompiledSteps
from chairlift.engine.model.probe import probe
from chairlift.engine.model.trial import within_largest
from chairlift.scheduler.limits import Limits

__all__ = ["on_cuda"]


@pytest.fixture(autouse=True)
def _without_host_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes the host kernels that other tests install, since they cannot be traced."""
    names = names_of(tiny_model("llama"))
    monkeypatch.setitem(names, "swiglu", getattr(names["swiglu"], "replaces", names["swiglu"]))


def _core(kind: TinyKind) -> EngineCore:
    model = tiny_model(kind)
    attention.install(model, cuda_attention.attend)
    geometry, vocabulary, _ = probe(model, kind)
    return build_core(model, vocabulary, Limits(4, 40, 1 << 24, geometry), layers=ON_CUDA)


def _submit(core: EngineCore, name: str, prompt: list[int], tokens: int) -> None:
    core.submit(Submit(name, prompt, SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)))


def _assert_gives_up_in_time() -> None:
    """Asserts that compiled steps are given up, and that the tokens are right."""
    core = _core("llama")
    _submit(core, "a", [5, 6, 7], 3 * STEADY)
    tokens: list[int] = []
    while not core.idle:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    assert core.pipeline.forward._rows._gives_up
    assert tokens == solo_tokens(tiny_model("llama"), [5, 6, 7], 3 * STEADY)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_shape_is_traced_once_and_correct_in_every_step(
    kind: TinyKind, on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though offsets, lengths and the ring's cursor differ in each step."""
    monkeypatch.setattr(cuda_attention, "decode_attention", traceable)
    TRACES.clear()
    core = _core(kind)
    core.pipeline.forward._rows = steps = ComparedSteps(core.pipeline.forward._model)
    prompts = {"a": [5, 6, 7], "b": list(range(9, 40))}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        _submit(core, name, prompt, 60)
    while not core.idle:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
    expected = tiny_model(kind)
    assert tokens == {name: solo_tokens(expected, prompt, 60) for name, prompt in prompts.items()}
    assert steps.compared > 30
    layers = len(core.batch.bands[0].attention)
    assert len(TRACES) == layers * len(steps._known)


def test_steps_that_cannot_be_traced_run_uncompiled(on_cuda: None) -> None:
    """The test's kernel is in NumPy, which needs real numbers."""
    _assert_gives_up_in_time()


def test_a_compiled_step_that_is_wrong_is_not_used(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*given: object) -> mx.array:
        try:
            return _decode(*given)  # type: ignore[arg-type]
        except Exception:
            return 5 * decode_in_trace(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_attention, "decode_attention", wrong)
    _assert_gives_up_in_time()


def test_nonfinite_logits_do_not_count_as_a_difference() -> None:
    """A -inf logit or an overflowed row does not make a compiled step wrong."""
    logits = mx.random.normal((4, 9), key=mx.random.key(0))
    spoiled = mx.array(logits)
    spoiled[1, 3], spoiled[2] = -mx.inf, mx.nan
    alike = within_largest(0.05)
    assert alike(spoiled, spoiled + 1e-4)
    assert not alike(spoiled, spoiled + 1)
    assert not alike(logits, spoiled)
    assert not alike(spoiled, logits)
    assert not alike(logits, logits[:3])


def test_compiled_shapes_are_dropped_when_there_are_too_many() -> None:
    steps = CompiledSteps(tiny_model("llama"))
    core = _core("llama")
    steps._known = {(number,) for number in range(MAX_SHAPES)}
    before = steps._call
    band = core.batch.bands[0]
    assert not any(steps._is_steady(band) for _ in range(STEADY))
    assert steps._is_steady(band)
    assert len(steps._known) == 1
    assert steps._call is not before
