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

from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import Quantization
from chairlift.engine.core.core import EngineCore
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.paged.compiled import MAX_SHAPES, STEADY, CompiledSteps
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.model.trials.trial import within_largest
from chairlift.scheduler.limits import Limits

pytestmark = pytest.mark.usefixtures("traceable")


def _core(
    kind: TinyKind, kernels: HostPages | None, quantization: Quantization | None = None
) -> EngineCore:
    """An engine over pages; without ``kernels``, over columns."""
    model = tiny_model(kind, head_dim=32)
    attention.install(model)
    geometry, vocabulary, _ = probe(model, kind, quantization)
    limits = Limits(4, 40, 1 << 24, geometry)
    core = build_core(model, vocabulary, limits, quantization=quantization, kernels=kernels)
    assert core.batch.queued == (kernels is not None)
    return core


def _tokens(core: EngineCore, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """The tokens of requests that arrive together."""
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        _submit(core, name, prompt, count)
    while not core.idle:
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
    return tokens


def _submit(core: EngineCore, name: str, prompt: list[int], tokens: int) -> None:
    core.submit(Submit(name, prompt, SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)))


def _assert_gives_up_in_time(kernels: HostPages) -> None:
    """Asserts that compiled steps are given up, and that the tokens are right."""
    core = _core("llama", kernels)
    tokens = _tokens(core, {"a": [5, 6, 7]}, 3 * STEADY)["a"]
    assert _steps(core)._gives_up
    assert tokens == solo_tokens(tiny_model("llama", head_dim=32), [5, 6, 7], 3 * STEADY, tokens)


def _steps(core: EngineCore) -> CompiledSteps:
    forward = core.pipeline.forward
    assert isinstance(forward, PagedForward)
    return forward._steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("llama", None),
        ("llama", Quantization(8, 32)),
        ("gemma3", None),
        ("gemma3", Quantization(8, 32)),
        ("lfm2", None),
    ],
)
def test_a_shape_is_traced_once_and_correct_in_every_step(
    kind: TinyKind, quantization: Quantization | None
) -> None:
    """Though positions, lengths and page tables differ in each step."""
    kernels = HostPages(traceable=True)
    core = _core(kind, kernels, quantization)
    forward = core.pipeline.forward
    assert isinstance(forward, PagedForward)
    forward._steps = steps = ComparedSteps(forward._logits)
    prompts = {"a": [5, 6, 7], "b": list(range(9, 40))}
    tokens = _tokens(core, prompts, 40)  # of which b's fill a page
    assert tokens == _tokens(_core(kind, None, quantization), prompts, 40)
    assert steps.compared > 20
    shapes = sum(count > STEADY for count in steps._seen.values())
    attention_layers = sum(not kind.recurrent for kind in make_batch(tiny_model(kind)).kinds)
    assert len(kernels.traces) == shapes * attention_layers


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
