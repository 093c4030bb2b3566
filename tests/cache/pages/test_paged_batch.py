"""Rows over pages: joins, steps, windows, sharing, and memory that is never read."""

from __future__ import annotations

import functools
import random

import mlx.core as mx
import pytest
from support.engine.pages import HostPages, memory_of

from chairlift.cache.batch import BatchCache
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.kernels import KeysValues, Scoring
from chairlift.cache.pages.layer import paged_step
from chairlift.cache.pages.memory import PagedMemory
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.piece import PagedPiece
from chairlift.cache.pages.pool import OutOfPages
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, merged

HEADS, KEY_HEADS, DIM = 4, 2, 8
KINDS = (LayerKind(None), LayerKind(100), LayerKind(None))


def _memory(pages: int = 60, kinds: tuple[LayerKind, ...] = KINDS) -> PagedMemory:
    memory = PagedMemory(kinds, dict.fromkeys({kind.window for kind in kinds}, pages), HostPages())
    for layer in memory.layers:
        layer.buffers_for(KeysValues(*[mx.zeros((1, KEY_HEADS, 1, DIM))] * 2))
        # Memory that no row has written must not be read.
        for array in layer.buffers or ():
            memory_of(array)[0][:] = float("nan")
    return memory


@functools.cache
def _keys(sequence: int) -> mx.array:
    """The keys and values of a sequence's tokens: ``[key heads, tokens, dim]``."""
    keys = mx.random.normal((KEY_HEADS, 1100, DIM), key=mx.random.key(sequence))
    mx.eval(keys)
    return keys


class _Model:
    """Attention layers alone; sequences are numbers from which their tokens' keys follow."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.batch = PagedBatch(memory)
        self.sequences: list[int] = []

    def prompt(self, sequence: int, tokens: int, state: Snapshot | None = None) -> PagedBatch:
        """Computes a prompt's tokens up to ``tokens``, in chunks."""
        prompt = PagedBatch(self.memory)
        prompt.join(state)
        while prompt.offsets[0] < tokens:
            chunk = min(37, tokens - prompt.offsets[0])
            self._step([], [(prompt, chunk, sequence)])
        return prompt

    def decode(self) -> None:
        self._step([self.batch], [])

    def join(self, sequence: int, state: Snapshot) -> None:
        self.batch.join(state)
        self.sequences.append(sequence)
        mx.eval(self.batch.take_moves())

    def _step(self, bands: list[PagedBatch], chunks: list[tuple[PagedBatch, int, int]]) -> None:
        owners = [(s, self.batch.offsets[row], 1) for row, s in enumerate(self.sequences)]
        places = owners if bands else []
        places += [(sequence, batch.offsets[0], new) for batch, new, sequence in chunks]
        parts = [_keys(s)[:, at : at + new].swapaxes(0, 1) for s, at, new in places]
        keys = mx.concatenate(parts)[:, :, None]
        queries = mx.random.normal((len(keys), HEADS, 1, DIM), key=mx.random.key(len(keys)))
        with paged_step(bands, [(batch, new) for batch, new, _ in chunks]) as step:
            for kind, layer in zip(self.memory.kinds, step.layers(), strict=True):
                layer.update_and_fetch(keys, keys)
                mixed = layer.attend(queries, Scoring(0.3, layer.make_mask(1).window))
                mx.eval(mixed)
                assert mx.allclose(mixed, self._expected(queries, places, kind), atol=1e-4)

    def _expected(
        self, queries: mx.array, places: list[tuple[int, int, int]], kind: LayerKind
    ) -> mx.array:
        outputs, token = [], 0
        for sequence, at, new in places:
            seen = _keys(sequence)[None, :, : at + new]
            behind = mx.arange(at, at + new)[:, None] - mx.arange(at + new)
            mask = (behind >= 0) & (behind < (kind.window or at + new))
            part = queries[token : token + new].swapaxes(0, 2)
            mixed = mx.fast.scaled_dot_product_attention(part, seen, seen, scale=0.3, mask=mask)
            outputs.append(mixed.swapaxes(0, 2))
            token += new
        return mx.concatenate(outputs)


@pytest.mark.parametrize("seed", range(3))
def test_rows_see_exactly_their_own_tokens(seed: int) -> None:
    """While rows of any length join, share prefixes, take steps, and leave."""
    rng = random.Random(seed)
    memory = _memory()
    model = _Model(memory)
    for sequence in range(9):
        tokens = rng.choice([1, 63, 64, 65, rng.randint(2, 230)])
        prompt = model.prompt(sequence, tokens)
        state = prompt.hand_over(0)
        del prompt
        for _ in range(rng.choice([1, 1, 3])):  # choices of one prompt share its pages
            model.join(sequence, state)
        del state
        for _ in range(rng.randint(1, 5)):
            model.decode()
            model.batch.check_integrity()
        leaves = [row for row in range(len(model.batch)) if rng.random() < 0.3]
        order = model.batch.leave(leaves)
        model.sequences = [model.sequences[row] for row in order]
        model.batch.check_integrity()
    model.batch.reset()
    assert all(pool.used == 0 for pool in memory.pools.values())


def test_a_prefix_is_stored_once() -> None:
    memory = _memory(kinds=(LayerKind(None),))
    model = _Model(memory)
    state = model.prompt(1, 5 * PAGE_TOKENS).extract(0)
    for _ in range(20):
        model.join(1, state)
    assert memory.pools[None].used == 5
    assert model.batch.nbytes == 5 * memory.page_bytes(None)
    model.decode()
    assert memory.pools[None].used == 5 + 20


def test_one_row_continues_in_the_last_page_and_others_copy_it() -> None:
    memory = _memory(kinds=(LayerKind(None),))
    model = _Model(memory)
    state = model.prompt(1, PAGE_TOKENS + 10).hand_over(0)
    model.join(1, state)
    assert memory.pools[None].used == 2
    model.join(1, state)
    assert memory.pools[None].used == 3
    for _ in range(60):
        model.decode()
    assert memory.pools[None].used == 5
    # The first row has ended: a snapshot of it may be continued, an older one may not.
    ended = model.batch.extract(0)
    model.sequences = [model.sequences[row] for row in model.batch.leave([0])]
    model.join(1, ended.part(0, ended.stop - 1))
    model.join(1, ended)
    model.decode()


def test_one_operation_a_layer_copies_the_pages_of_all_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = []

    def copy(kernels: HostPages, buffers: KeysValues, pairs: mx.array) -> mx.array:
        copied.append(len(pairs))
        return original(kernels, buffers, pairs)

    original = HostPages.copy
    monkeypatch.setattr(HostPages, "copy", copy)
    model = _Model(_memory())
    state = model.prompt(1, PAGE_TOKENS + 10).extract(0)
    for _ in range(8):
        model.join(1, state)
    assert not copied
    model.decode()
    assert copied == [8] * len(KINDS)


@pytest.mark.parametrize("reads", [False, True])
def test_pending_copies_come_before_all_that_reads_or_writes_their_pages(reads: bool) -> None:
    """A copy of a copy, a row whose state is read before its first step, and reused pages."""
    memory = _memory()
    model = _Model(memory)
    state = model.prompt(1, PAGE_TOKENS + 10).extract(0)
    model.join(1, state)
    model.join(1, model.batch.extract(0))
    if reads:
        for piece in model.batch.extract(1).layers:
            assert isinstance(piece, PagedPiece)
            expected = _keys(1)[None, :, PAGE_TOKENS + 10 - piece.tokens : PAGE_TOKENS + 10]
            assert mx.array_equal(piece.loaded().keys, expected)
    # The only other reference to the copied page goes, and another sequence is restored.
    del state
    keys = _keys(2)[None, :, : PAGE_TOKENS + 5]
    pieces = tuple(KVPiece(keys, keys) for _ in KINDS)
    model.join(2, Snapshot(0, PAGE_TOKENS + 5, pieces))
    for _ in range(3):
        model.decode()


def test_the_prefix_tree_shares_pages_and_frees_them() -> None:
    """A longer prompt that shares a prefix continues in a copy of one page."""
    memory = _memory(kinds=(LayerKind(None),))
    pool = memory.pools[None]
    tree = PrefixTree(memory.kinds, 1 << 30)
    model = _Model(memory)
    tokens = list(range(200))
    first = model.prompt(1, 200)
    assert tree.insert(tokens, first.extract(0))
    first.leave([0])
    used = pool.used
    assert used == 4
    match = tree.match([*tokens[:100], 7, 8])
    assert match.length == 100
    state = match.snapshot()
    other = PagedBatch(memory)
    other.join(state)
    mx.eval(other.take_moves())
    assert pool.used == used + 1
    assert isinstance(state.layers[0], PagedPiece)
    assert tree.insert([*tokens[:100]], other.extract(0))
    # Split, and joined again: by reference.
    whole = tree.match(tokens, 150).snapshot()
    piece = whole.layers[0]
    assert isinstance(piece, PagedPiece)
    expected = _keys(1)[None, :, :150]
    assert mx.array_equal(piece.loaded().keys, expected)
    del piece, whole, state, match, other, first
    assert tree.evict(1 << 30)
    assert pool.used == 0


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_states_move_between_columns_and_pages(tokens: int) -> None:
    """A snapshot of columns restores in pages, and the other way round."""
    memory = _memory()
    model = _Model(memory)
    pages = model.prompt(1, tokens).extract(0)
    columns = BatchCache(memory.kinds)
    columns.join(pages)
    loaded = columns.extract(0)
    assert all(isinstance(piece, KVPiece) for piece in loaded.layers)
    model.join(
        1, merged(memory.kinds, [loaded.part(0, tokens // 2), loaded.part(tokens // 2, tokens)])
    )
    for _ in range(3):
        model.decode()


def test_layers_that_are_never_written_have_no_tokens() -> None:
    """Some models have layers without attention among the others."""
    memory = PagedMemory((LayerKind(None),) * 2, {None: 9}, HostPages())
    batch = PagedBatch(memory)
    batch.join()
    keys = _keys(1)[:, :70].swapaxes(0, 1)[:, :, None]
    with paged_step([], [(batch, 70)]) as step:
        layer, _ = step.layers()
        layer.update_and_fetch(keys, keys)
        mx.eval(layer.attend(mx.zeros((70, HEADS, 1, DIM)), Scoring(1.0)))
    state = batch.extract(0)
    assert [piece.loaded().keys.shape[1] for piece in state.layers] == [KEY_HEADS, 0]
    for snapshot in (state, state.loaded()):
        batch.join(snapshot)
        copied = batch.extract(len(batch) - 1).loaded()
        assert mx.array_equal(copied.layers[0].keys, _keys(1)[None, :, :70])


def test_a_window_gives_pages_back() -> None:
    memory = _memory(kinds=(LayerKind(100),))
    model = _Model(memory)
    prompt = model.prompt(1, 1000)
    assert memory.pools[100].used <= 3
    model.join(1, prompt.extract(0))
    for _ in range(5):
        model.decode()


def test_too_few_pages_are_an_error_once_no_prefix_can_be_dropped() -> None:
    memory = _memory(pages=3, kinds=(LayerKind(None),))
    model = _Model(memory)
    kept = [model.prompt(1, 70).extract(0)]
    memory.on_shortage(lambda: bool(kept) and not kept.clear())
    model.prompt(2, 2 * PAGE_TOKENS)
    assert not kept
    with pytest.raises(OutOfPages):
        model.prompt(3, 4 * PAGE_TOKENS)


def test_buffers_are_the_layers_own() -> None:
    memory = _memory()
    assert len({id(layer.buffers) for layer in memory.layers}) == len(KINDS)
    assert all(isinstance(layer.buffers, KeysValues) for layer in memory.layers)
