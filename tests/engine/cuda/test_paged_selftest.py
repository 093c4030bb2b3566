"""The trial of the paged kernels at start, in the emulator: it accepts right kernels, no wrong one.

The wrong ones are right kernels that get wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated

from chairlift.cache.pages.kernels import KeysValues
from chairlift.engine.cuda.paged import (
    chunk_attention,
    copy_pages,
    put,
    selftest,
    token_attention,
)
from chairlift.engine.cuda.paged.arrays import ChunkStep, TokenStep

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")


def written_elsewhere(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Attention that reads the pool and writes to a copy."""

    def changed(queries: mx.array, new: KeysValues, pool: KeysValues, *rest: Any) -> mx.array:
        copies = KeysValues(*(buffer + 0 for buffer in pool))
        mx.eval(copies)
        return attention(queries, new, copies, *rest)

    return changed


def other_pages(pages: mx.array) -> mx.array:
    """The page table with each line in the place of another."""
    lines = int(pages[0].item()) - 1  # the pages follow them and a zero
    return mx.concatenate([pages[:lines][::-1], pages[lines:]])


def one_more(step: TokenStep) -> TokenStep:
    return step._replace(lengths=mx.minimum(step.lengths + 1, step.stops))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda step: step, True),
        (one_more, False),
        (lambda step: step._replace(owners=mx.zeros_like(step.owners)), False),
        (lambda step: step._replace(begins=step.stops), False),
        (None, False),
    ],
    ids=["right", "a column more", "one owner", "from the pool", "written elsewhere"],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_wrong_attention_of_tokens_is_found(
    change: Callable[[TokenStep], TokenStep] | None,
    right: bool,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = token_attention.token_attention

    def changed(queries: mx.array, new: KeysValues, pool: KeysValues, step: TokenStep, *rest: Any):
        assert change is not None
        return attention(queries, new, pool, change(step), *rest)

    wrong = changed if change else written_elsewhere(attention)
    monkeypatch.setattr(selftest, "token_attention", wrong)
    with emulated(token_attention, backwards=True):
        assert selftest.tokens_right(9, 50, with_sinks) == right


@pytest.mark.slow
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_attention_of_one_token_is_right(with_sinks: bool) -> None:
    with emulated(token_attention, backwards=True):
        assert selftest.tokens_right(1, None, with_sinks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda step, window: (step, window), True),
        (lambda step, window: (step, window + 1), False),
        (lambda step, window: (step._replace(pages=other_pages(step.pages)), window), False),
        (None, False),
    ],
    ids=["right", "a column more", "other pages", "written elsewhere"],
)
def test_wrong_attention_of_chunks_is_found(
    change: Callable[[ChunkStep, int], tuple[ChunkStep, int]] | None,
    right: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = chunk_attention.chunk_attention

    def changed(
        queries: mx.array,
        new: KeysValues,
        pool: KeysValues,
        step: ChunkStep,
        scale: float,
        window: int,
        sinks: mx.array | None,
    ) -> mx.array:
        assert change is not None
        step, window = change(step, window)
        return attention(queries, new, pool, step, scale, window, sinks)

    wrong = changed if change else written_elsewhere(attention)
    monkeypatch.setattr(selftest, "chunk_attention", wrong)
    with emulated(chunk_attention, backwards=False), emulated(token_attention, backwards=False):
        for tile in (chunk_attention.SHORT, chunk_attention.TALL):
            assert selftest.chunks_right(window=30, with_sinks=True, tile=tile) == right


@pytest.mark.parametrize("right", [True, False])
def test_wrong_slots_are_found(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(pool: KeysValues, new: KeysValues, slots: mx.array) -> mx.array:
        return put.put(pool, new, slots if right else mx.contiguous(slots[::-1]))

    monkeypatch.setattr(selftest, "put", changed)
    with emulated(put, backwards=False):
        assert selftest.put_right() == right


@pytest.mark.parametrize("right", [True, False])
def test_wrong_copies_are_found(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(pool: KeysValues, pairs: mx.array) -> mx.array:
        return copy_pages.copy_pages(pool, pairs if right else mx.contiguous(pairs[:, ::-1]))

    monkeypatch.setattr(selftest, "copy_pages", changed)
    with emulated(copy_pages, backwards=False):
        assert selftest.copies_right() == right
