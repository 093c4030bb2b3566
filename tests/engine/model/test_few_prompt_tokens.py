"""A few prompt tokens are computed like the tokens of rows, with the same results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.engine.model import attention, paged_forward
from chairlift.engine.model.forward import Chunk
from chairlift.engine.model.paged_forward import FEW_COLUMNS, PagedForward


class _Tokens:
    """A prompt's cache with so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.offsets = [tokens]


def _chunk(begun: int, tokens: int, choices: int = 1, **more: Any) -> Chunk:
    return Chunk(_Tokens(begun), [1] * tokens, choices, **more)  # type: ignore[arg-type]


FEW = 64


@pytest.fixture(autouse=True, scope="module")
def _few_tokens() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_forward, "FEW_TOKENS", FEW)
        yield


def _tokens(kind: TinyKind, few: bool, drafts: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """The tokens of random requests, and asserts that ``few`` prompts are computed like rows."""
    model = tiny_model(kind, seed=2)
    attention.install(model)
    propose: dict[str, Any] = {"draft": 4, "propose": oracles(drafts, 0.3)} if drafts else {}
    bench = Bench(model, kernels=HostPages(), kv=2 << 20, prefix=1 << 19, rows=6, **propose)
    if drafts:
        verify_any(bench.core)
    forward = bench.core.pipeline.forward
    assert isinstance(forward, PagedForward)
    calls: list[tuple[int, bool]] = []
    original = forward._with_few

    def spied(rows: Any, tokens: Any, chunks: Any, runs: Any, counts: Any) -> Any:
        calls.append((tokens.shape[0], counts is not None))
        return original(rows, tokens, chunks, runs, counts)

    forward._with_few = spied  # type: ignore[method-assign]
    random_ = random.Random(5)
    shared = [random_.randrange(3, 60) for _ in range(70)]
    for number in range(14):
        own = [random_.randrange(3, 60) for _ in range(random_.randrange(1, 90))]
        prompt = shared[: random_.choice([0, 30, 70])] + own
        bench.submit(str(number), prompt, count=random_.randrange(1, 24), seed=number)
        for _ in range(random_.randrange(4)):
            bench.step()
    bench.drain()
    assert bool(calls) == few
    if few:
        assert any(rows for rows, _ in calls)
        assert any(drafted for _, drafted in calls) == bool(drafts)
    return {str(number): bench.tokens(str(number)) for number in range(14)}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_output_is_the_same_with_and_without(
    kind: TinyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = _tokens(kind, True, {})
    drafts = {name: [tokens] for name, tokens in few.items()}
    assert _tokens(kind, True, drafts) == few
    monkeypatch.setattr(paged_forward, "FEW_TOKENS", 0)
    assert _tokens(kind, False, {}) == few


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_few_tokens_see_few_columns(places: list[tuple[int, int]], rows: int) -> None:
    chunks = [_chunk(begun, tokens) for begun, tokens in places]
    few = paged_forward._few(mx.zeros((rows,), mx.int32), chunks)
    tokens = sum(tokens for _, tokens in places)
    columns = sum(tokens * (begun + tokens) for begun, tokens in places)
    assert few == (tokens <= FEW and columns <= FEW_COLUMNS)


def test_steps_that_give_more_or_less_than_sampled_logits_are_not_computed_so() -> None:
    """Without rows and ending prompts nothing would evaluate the step's logits."""
    none, row = mx.zeros((0,), mx.int32), mx.zeros((1,), mx.int32)
    assert paged_forward._few(none, [_chunk(0, 3)])
    assert not paged_forward._few(none, [_chunk(0, 3, choices=0)])
    assert paged_forward._few(row, [_chunk(0, 3, choices=0)])
    assert not paged_forward._few(row, [_chunk(0, 3, scored=2)])
    assert not paged_forward._few(row, [_chunk(0, 3, pooled=True)])
