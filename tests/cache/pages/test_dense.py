"""Copies of what is in pages, for attention that model files compute by themselves."""

from __future__ import annotations

import functools
import random

import mlx.core as mx
import numpy as np
import pytest
from support.engine.pages import HostPages, memory_of

from chairlift.cache.packed.split import SplitPart
from chairlift.cache.pages import step_parts
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.dense import DenseLayer
from chairlift.cache.pages.kernels import KeysValues
from chairlift.cache.pages.layer import paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.step_parts import Division, PagedAttention
from chairlift.cache.snapshot import LayerKind

KINDS = (LayerKind(None), LayerKind(100), LayerKind(20))
# Keys and values have different heads and dims, as those of an indexer.
KEYS, VALUES = (2, 8), (1, 12)


def _memory() -> PagedMemory:
    """Pages whose memory is NaN where no row has written."""
    windows = {kind.window for kind in KINDS}
    memory = PagedMemory(KINDS, dict.fromkeys(windows, 60), HostPages())
    for layer in memory.layers:
        shapes = [(1, heads, 1, dim) for heads, dim in (KEYS, VALUES)]
        for array in layer.buffers_for(KeysValues(*map(mx.zeros, shapes))):
            memory_of(array)[0][:] = float("nan")
    return memory


@functools.cache
def _sequence(number: int) -> KeysValues:
    """The keys and values of a sequence's tokens: ``[1, heads, tokens, dim]``."""
    keys = mx.random.split(mx.random.key(number), 2)
    arrays = KeysValues(
        *(
            mx.random.normal((1, heads, 400, dim), key=key)
            for key, (heads, dim) in zip(keys, (KEYS, VALUES), strict=True)
        )
    )
    mx.eval(*arrays)
    return arrays


@functools.cache
def _numbers(number: int) -> list[np.ndarray]:
    return [np.array(array) for array in _sequence(number)]


def _step(
    rows: list[tuple[int, int]], band: PagedBatch, chunks: list[tuple[PagedBatch, int, int]]
) -> None:
    """A step of rows with some tokens each, and of chunks; checks what each of them sees.

    Args:
        rows: the sequence and number of tokens of each row of the band.
        chunks: prompts, the number of their new tokens, and their sequences.
    """
    places = [(s, band.offsets[row], count) for row, (s, count) in enumerate(rows)]
    places += [(sequence, prompt.offsets[0], new) for prompt, new, sequence in chunks]
    parts = [[x[:, :, at : at + new] for x in _sequence(s)] for s, at, new in places]
    new = [mx.concatenate([part[i][0].swapaxes(0, 1)[:, None] for part in parts]) for i in (0, 1)]
    owners = [(s, at + i) for s, at, count in places for i in range(count)]
    counts = [count for _, count in rows]
    drafted = [counts] if max(counts, default=1) > 1 else None
    new_chunks = [(prompt, count) for prompt, count, _ in chunks]
    division = Division(attention=PagedAttention.DENSE)
    with paged_step([band], new_chunks, drafted=drafted, division=division) as step:
        for kind, layer in zip(KINDS, step.layers(), strict=True):
            assert isinstance(layer, DenseLayer)
            mask = layer.make_mask(1)
            for number, part in enumerate(layer.parts):
                arrays = [part.places.taken(x).swapaxes(1, 2) for x in new]
                keys, values = part.cache.update_and_fetch(*arrays)
                _check(part, kind, keys, values, mask.masks[number], owners)
    if drafted:
        band.advance(counts)


def _check(
    part: SplitPart,
    kind: LayerKind,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    owners: list[tuple[int, int]],
) -> None:
    """Asserts that each token of a part sees its own sequence up to itself, and nothing else."""
    where = part.places
    tokens, seen = where.tokens.tolist(), np.array(mask)[:, 0]
    arrays = [np.array(array) for array in (keys, values)]
    assert not any(np.isnan(array).any() for array in arrays)
    columns = range(len(tokens)) if where.columns is None else where.columns.tolist()
    for column in columns:
        row, at = divmod(column, where.length)
        sequence, position = owners[tokens[column]]
        first = 0 if kind.window is None else max(0, position + 1 - kind.window)
        assert seen[row, at].sum() == position + 1 - first
        for array, expected in zip(arrays, _numbers(sequence), strict=True):
            chosen = array[row][:, seen[row, at]]
            assert np.allclose(chosen, expected[0, :, first : position + 1], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_see_their_sequence_up_to_themselves(
    seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full attention and windows; rows with and without drafts, prompts of all lengths."""
    if not shared:
        monkeypatch.setattr(step_parts, "MAX_WASTE", 0)
    rng = random.Random(seed)
    memory = _memory()
    band, sequences = PagedBatch(memory), list[int]()
    for sequence in range(6):
        prompt = PagedBatch(memory)
        prompt.join()
        tokens = rng.choice([1, 2, 63, 64, 65, 130, 250])
        while prompt.offsets[0] < tokens:
            chunk = min(rng.choice([1, 30, 100]), tokens - prompt.offsets[0])
            drafting = rng.random() < 0.4
            rows = [(s, rng.randrange(1, 4) if drafting else 1) for s in sequences]
            _step(rows, band, [(prompt, chunk, sequence)])
            band.check_integrity()
        band.join(prompt.hand_over(0))
        sequences.append(sequence)
        leaves = {row for row in range(len(band)) if rng.random() < 0.15}
        sequences = [sequences[row] for row in band.leave(leaves)]
