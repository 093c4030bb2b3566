"""The kernel of ``latent_attention``, run on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.page_table import PageLists, page_table
from chairlift.engine.cuda.paged import latent_attention, latent_selftest, token_attention
from chairlift.engine.cuda.paged.arrays import TokenStep

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

SCALE = 0.11
# Old and new tokens of each sequence, at and around the ends of pages and of tiles.
SEQUENCES = ((130, 1), (0, 5), (63, 2), (64, 1), (0, 1), (60, 9))


class Shape(NamedTuple):
    heads: int
    latent: int
    rotary: int
    dtype: mx.Dtype


@dataclass
class Case:
    """A step's inputs, with NaN wherever the kernel may not read, and what it must compute."""

    shape: Shape
    sequences: Sequence[tuple[int, int]] = SEQUENCES
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        shape, tokens = self.shape, sum(new for _, new in self.sequences)
        self.queries = self._random(tokens, shape.heads, 1, shape.latent)
        self.rotary = self._random(tokens, shape.heads, 1, shape.rotary)
        self.whole = [
            [self._random(old + new, dim) for dim in (shape.latent, shape.rotary)]
            for old, new in self.sequences
        ]
        counts = [-(-(old + new) // PAGE_TOKENS) for old, new in self.sequences]
        numbers = (1 + self.rng.permutation(sum(counts))).astype(np.int32)
        starts = np.cumsum([0, *counts[:-1]]).astype(np.int32)
        self.pages = [numbers[at : at + n] for at, n in zip(starts, counts, strict=True)]
        self.table = mx.array(page_table(PageLists(starts, numbers), len(self.sequences)))
        self.new = KeysValues(*map(self._of_step, range(2)))
        self.pool = KeysValues(*(self._pooled(of, False) for of in range(2)))

    def attend(self, backwards: bool, limit: int | None = None) -> mx.array:
        own = [
            (row, old, old + i + 1, old + i + 1)
            for row, (old, new) in enumerate(self.sequences)
            for i in range(new)
        ]
        arrays = [mx.array(numbers, mx.int32) for numbers in zip(*own, strict=True)]
        with emulated(latent_attention, backwards):
            return latent_attention.latent_attention(
                *(self.queries, self.rotary, self.new, self.pool),
                TokenStep(self.table, *arrays),
                max(map(sum, self.sequences)) if limit is None else limit,
                SCALE,
            )

    def check(self, result: mx.array) -> None:
        """Asserts the result, and that the pool has its old tokens, the new ones, nothing else."""
        tolerance = {mx.float16: 3e-3, mx.bfloat16: 2e-2}[self.shape.dtype]
        assert result.dtype == self.shape.dtype
        expected = mx.concatenate(
            [self._attended(*each) for each in zip(self._firsts(), self.whole, strict=True)]
        )
        np.testing.assert_allclose(
            np.array(result.astype(mx.float32)), np.array(expected), rtol=tolerance, atol=tolerance
        )
        for of, buffer in enumerate(self.pool):
            bits = (np.array(x.view(mx.uint16)) for x in (buffer, self._pooled(of, True)))
            np.testing.assert_array_equal(*bits)

    def _firsts(self) -> list[int]:
        return np.cumsum([0, *(new for _, new in self.sequences[:-1])]).tolist()

    def _random(self, *shape: int) -> mx.array:
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.shape.dtype)

    def _of_step(self, of: int) -> mx.array:
        parts = [own[of][old:] for own, (old, _) in zip(self.whole, self.sequences, strict=True)]
        return mx.concatenate(parts)[:, None, None]

    def _pooled(self, of: int, written: bool) -> mx.array:
        """The pages with the old tokens, and the new ones if they are ``written``."""
        count, dim = 1 + sum(map(len, self.pages)), (self.shape.latent, self.shape.rotary)[of]
        pool = np.full((count, 1, PAGE_TOKENS, dim), np.nan, np.float32)
        for own, pages, (old, new) in zip(self.whole, self.pages, self.sequences, strict=True):
            numbers = np.array(own[of].astype(mx.float32))
            for at in range(old + new * written):
                pool[pages[at // PAGE_TOKENS], 0, at % PAGE_TOKENS] = numbers[at]
        result = mx.array(pool).astype(self.shape.dtype)
        mx.eval(result)
        return result

    def _attended(self, first: int, own: Sequence[mx.array]) -> mx.array:
        """The results of a sequence's tokens, which begin with the step's token ``first``."""
        latents, keys = (array.astype(mx.float32) for array in own)
        count = len(latents)
        new = next(
            n for at, (_, n) in zip(self._firsts(), self.sequences, strict=True) if at == first
        )
        queries, rotary = (
            array[first : first + new, :, 0].astype(mx.float32)
            for array in (self.queries, self.rotary)
        )
        scores = SCALE * (queries @ latents.T) + rotary @ keys.T
        seen = mx.arange(count) <= mx.arange(count - new, count)[:, None]
        weights = mx.softmax(mx.where(seen[:, None], scores, -mx.inf), axis=-1)
        return (weights @ latents)[:, :, None]


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 512, 64, mx.bfloat16),
        Shape(5, 128, 32, mx.float16),
        Shape(40, 256, 64, mx.bfloat16),
        Shape(17, 64, 32, mx.float16),
    ],
    ids=str,
)
def test_tokens_attend_to_what_they_see(shape: Shape, backwards: bool) -> None:
    case = Case(shape)
    case.check(case.attend(backwards))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 33])
def test_blocks_that_share_a_token_are_merged(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "SPANS", ())
    monkeypatch.setattr(token_attention, "MAX_SPAN", 64)
    for backwards in (False, True):
        case = Case(Shape(heads, 128, 32, mx.bfloat16), ((200, 3), (0, 70), (5, 1)))
        case.check(case.attend(backwards))
        # Tokens that see more than the limit are computed in fewer blocks.
        case = Case(Shape(heads, 128, 32, mx.bfloat16), ((500, 2), (0, 1)))
        case.check(case.attend(backwards, limit=70))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    heads=st.integers(1, 35),
    sequences=st.lists(st.tuples(st.integers(0, 140), st.integers(1, 4)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_sequences(heads: int, sequences: list[tuple[int, int]], seed: int) -> None:
    case = Case(Shape(heads, 128, 32, mx.bfloat16), sequences, seed)
    case.check(case.attend(backwards=bool(seed % 2)))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(4, 128, 32, mx.float32), "float32"),
        (Shape(4, 96, 32, mx.bfloat16), "96"),
        (Shape(4, 128, 16, mx.bfloat16), "16"),
    ],
)
def test_other_shapes_are_refused(shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=f"no kernel for latent attention.*{message}"):
        Case(shape, ((3, 1),)).attend(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda step: step, True),
        (lambda step: step._replace(owners=mx.zeros_like(step.owners)), False),
        (lambda step: step._replace(begins=step.stops), False),
        (lambda step: step._replace(lengths=mx.maximum(step.lengths - 9, 1)), False),
    ],
    ids=["right", "one owner", "from the pool", "fewer columns"],
)
def test_the_trial_at_start_accepts_right_results_only(
    change: Callable[[TokenStep], TokenStep], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*arguments: Any) -> mx.array:
        own = [change(each) if isinstance(each, TokenStep) else each for each in arguments]
        return attention(*own)

    attention = latent_attention.latent_attention
    monkeypatch.setattr(latent_selftest, "latent_attention", changed)
    latent_selftest.latents_right.cache_clear()
    with emulated(latent_attention, False):
        assert latent_selftest.latents_right() == right
    latent_selftest.latents_right.cache_clear()
