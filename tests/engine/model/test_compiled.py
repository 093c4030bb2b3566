"""Compiled decode steps, with traceable kernels instead of CUDA's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.engine.core import build_core
from support.engine.on_cuda import ComparedSteps
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.core import EngineCore
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.attention import names_of
from chairlift.engine.model.compiled import MAX_SHAPES, STEADY, CompiledSteps
from chairlift.engine.model.paged_forward import PagedForward
from chairlift.engine.model.probe import probe
from chairlift.engine.model.trials.trial import within_largest
from chairlift.scheduler.limits import Limits


@pytest.fixture(autouse=True)
def _without_host_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes the host kernels that other tests install, since they cannot be traced."""
    names = names_of(tiny_model("llama"))
    monkeypatch.setitem(names, "swiglu", getattr(names["swiglu"], "replaces", names["swiglu"]))


def _core(kind: TinyKind, kernels: HostPages) -> EngineCore:
    model = tiny_model(kind)
    attention.install(model)
    geometry, vocabulary, _ = probe(model, kind)
    core = build_core(model, vocabulary, Limits(4, 40, 1 << 24, geometry), kernels=kernels)
    assert core.batch.queued
    return core


def _submit(core: EngineCore, name: str, prompt: list[int], tokens: int) -> None:
    core.submit(Submit(name, prompt, SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)))


def _assert_gives_up_in_time(kernels: HostPages) -> None:
    """Asserts that compiled steps are given up, and that the tokens are right."""
    core = _core("llama", kernels)
    _submit(core, "a", [5, 6, 7], 3 * STEADY)
    tokens: list[int] = []
    while not core.idle:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    assert _steps(core)._gives_up
    assert tokens == solo_tokens(tiny_model("llama"), [5, 6, 7], 3 * STEADY)


def _steps(core: EngineCore) -> CompiledSteps:
    forward = core.pipeline.forward
    assert isinstance(forward, PagedForward)
    return forward._steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_shape_is_traced_once_and_correct_in_every_step(kind: TinyKind) -> None:
    """Though positions, lengths and page tables differ in each step."""
    kernels = HostPages(traceable=True)
    core = _core(kind, kernels)
    forward = core.pipeline.forward
    assert isinstance(forward, PagedForward)
    forward._steps = steps = ComparedSteps(forward._model)
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
    shapes = sum(count > STEADY for count in steps._seen.values())
    assert len(kernels.traces) == shapes * len(expected.layers)


def test_steps_that_cannot_be_traced_run_uncompiled() -> None:
    """Kernels in NumPy need real numbers."""

    _assert_gives_up_in_time(HostPages())


def test_a_compiled_step_that_is_wrong_is_not_used() -> None:
    class Wrong(HostPages):
        def attend(self, *given: Any) -> mx.array:
            before = len(self.traces)
            result = super().attend(*given)
            return result if len(self.traces) == before else 5 * result

    _assert_gives_up_in_time(Wrong(traceable=True))


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
    core = _core("llama", HostPages())
    steps = _steps(core)
    steps._seen = {(number,): 1 for number in range(MAX_SHAPES)}
    before = steps._call
    _submit(core, "a", [5, 6, 7], 4)
    while not core.idle:
        core.step()
    assert len(steps._seen) < MAX_SHAPES
    assert steps._call is not before
