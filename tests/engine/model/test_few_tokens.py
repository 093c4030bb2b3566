"""Few tokens of prompts and drafts are computed one by one, with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.bench import Bench, serve_random
from support.engine.drafts import oracles, verify_any
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.step import KindStep
from chairlift.engine.model import attention
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.paged import inputs
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.paged.inputs import FEW_COLUMNS


def _batch(*offsets: int) -> PagedBatch:
    """Sequences with so many tokens."""
    batch = PagedBatch.__new__(PagedBatch)
    batch.offsets = list(offsets)
    return batch


def _chunk(begun: int, tokens: int, choices: int = 1, **more: Any) -> Chunk:
    return Chunk(_batch(begun), [1] * tokens, choices, **more)


FEW = 64


class Pages(HostPages):
    """Counts the calls with chunks that come from ``_one_by_one``."""

    one_by_one = False
    chunks = 0

    def attend(self, queries: mx.array, new: Any, buffers: Any, step: KindStep, *more: Any) -> Any:
        if self.one_by_one:
            self.chunks += len(step.tokens.chunks)
        return super().attend(queries, new, buffers, step, *more)


@pytest.fixture(autouse=True, scope="module")
def _few_tokens() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "FEW_TOKENS", FEW)
        yield


def _tokens(kind: TinyKind, few: bool, drafts: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """The tokens of random requests, and asserts whether prompts are computed one by one."""
    model = tiny_model(kind, seed=2)
    attention.install(model)
    propose: dict[str, Any] = {"draft": 4, "propose": oracles(drafts, 0.3)} if drafts else {}
    pages = Pages()
    bench = Bench(model, kernels=pages, kv=2 << 20, prefix=1 << 19, rows=6, **propose)
    if drafts:
        verify_any(bench.core)
    forward = bench.core.pipeline.forward
    assert isinstance(forward, PagedForward)
    calls: list[tuple[int, bool]] = []
    original = forward._one_by_one

    def spied(rows: Any, tokens: Any, chunks: Any, runs: Any, counts: Any) -> Any:
        if chunks:
            calls.append((len(tokens), counts is not None))
        pages.one_by_one = True
        try:
            return original(rows, tokens, chunks, runs, counts)
        finally:
            pages.one_by_one = False

    forward._one_by_one = spied  # type: ignore[method-assign]
    served = serve_random(bench, 14, seed=5)
    assert bool(calls) == few
    assert not pages.chunks
    if few:
        assert any(rows for rows, _ in calls)
        assert any(drafted for _, drafted in calls) == bool(drafts)
    return served


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_output_is_the_same_with_and_without(
    kind: TinyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = _tokens(kind, True, {})
    drafts = {name: [tokens] for name, tokens in few.items()}
    assert _tokens(kind, True, drafts) == few
    monkeypatch.setattr(inputs, "FEW_TOKENS", 0)
    assert _tokens(kind, False, {}) == few


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), max_size=4),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9)), max_size=20),
)
def test_few_tokens_see_few_columns(
    prompts: list[tuple[int, int]], rows: list[tuple[int, int]]
) -> None:
    chunks = [_chunk(*prompt) for prompt in prompts]
    few = inputs.are_few([_batch(*(old for old, _ in rows))], [[new for _, new in rows]], chunks)
    tokens = sum(new for _, new in prompts)
    several = [*prompts, *((old, new) for old, new in rows if new > 1)]
    columns = sum(new * (old + new) for old, new in several)
    assert few == (tokens <= FEW and columns <= FEW_COLUMNS)


def test_steps_that_need_more_than_logits_to_sample_from_have_chunks() -> None:
    assert inputs.are_few([], None, [_chunk(0, 3, choices=0)])
    assert not inputs.are_few([], None, [_chunk(0, 3, scored=2)])
    assert not inputs.are_few([], None, [_chunk(0, 3, pooled=True)])
