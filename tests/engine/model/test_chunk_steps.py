"""Compiled steps with chunks, with traceable kernels instead of CUDA's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.bench import Bench, serve_random
from support.engine.drafts import oracles, verify_any
from support.engine.on_cuda import ComparedSteps
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import step_size
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.model import attention
from chairlift.engine.model.paged import compiled, forward, inputs
from chairlift.engine.model.paged.forward import PagedForward

REQUESTS = 14


@pytest.fixture(autouse=True)
def _every_draft_is_compiled(traceable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts are chunks, too.
    monkeypatch.setattr(inputs, "FEW_COLUMNS", 12)
    # All columns are computed when a step is traced.
    monkeypatch.setattr(forward, "COMPILED_TOKENS", 256)


def _bench(kind: TinyKind, traceable: bool, **options: Any) -> tuple[Bench, PagedForward]:
    model = tiny_model(kind, seed=2, head_dim=32)
    attention.install(model)
    kernels = HostPages(traceable)
    bench = Bench(model, kernels=kernels, kv=2 << 20, prefix=1 << 19, rows=6, **options)
    forward = bench.core.pipeline.forward
    assert isinstance(forward, PagedForward)
    return bench, forward


@cache
def _uncompiled(kind: TinyKind) -> dict[str, list[int]]:
    bench, _ = _bench(kind, False)
    return serve_random(bench, REQUESTS, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_compiled_steps_with_prompts_are_right(
    kind: TinyKind, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever joins, shares pages, brings drafts or ends, and whichever rows there are."""
    monkeypatch.setattr(compiled, "STEADY", 0)
    expected = _uncompiled(kind)
    options: dict[str, Any] = {}
    if drafts:
        tokens = {name: [own] for name, own in expected.items()}
        options = {"draft": 4, "propose": oracles(tokens, 0.3)}
    bench, forward = _bench(kind, True, **options)
    forward._steps = ComparedSteps(forward._logits)
    if drafts:
        verify_any(bench.core)
    forward._chunk_steps = steps = ComparedSteps(forward._logits)
    forward._steps._checked = steps._checked = True
    assert serve_random(bench, REQUESTS, seed=5) == expected
    assert steps.compared > 20
    assert (steps.built_ahead > 5) == drafts


@pytest.mark.slow
def test_steps_compiled_in_advance_are_those_that_come() -> None:
    bench, forward = _bench("llama", True)
    bench.core.compile()
    for steps in (forward._steps, forward._chunk_steps):
        assert not steps._gives_up
    known = dict(forward._chunk_steps._seen)
    serve_random(bench, REQUESTS, seed=3)
    assert set(forward._chunk_steps._seen) == set(known)
    assert any(count > known[shape] for shape, count in forward._chunk_steps._seen.items())
    for band in bench.core.batch.bands:
        band.check_integrity()


@given(st.integers(1, 256), st.integers(1, 1280))
def test_any_step_has_one_of_few_shapes(rows: int, new: int) -> None:
    size = step_size(rows + new)
    limit = inputs.rows_bound(rows, size)
    assert rows <= limit <= size
    assert limit == size or limit in (64, 128, 256)


def test_the_length_of_a_prompt_is_no_part_of_a_steps_shape() -> None:
    """Else a long prompt would compile further steps while it is computed, 50 ms each."""
    memory = PagedMemory((LayerKind(None),), {None: 1000}, HostPages())
    batch = PagedBatch(memory)
    batch.join()
    shapes = set()
    for tokens in (100, 9000, 40_000):
        rest = tokens - batch.offsets[0]
        with paged_step([], [(batch, rest)]):
            pass
        with paged_step([], [(batch, 8)], 0, 1024) as step:
            shapes.add(compiled._shape(step, None))
    assert len(shapes) == 1
