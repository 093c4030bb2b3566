"""Chunked attention: which tokens a query sees, and llama4's rows against mlx-lm's caches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.values import VOCAB
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from support.engine.bench import Bench
from support.engine.kv import tokens_to_kv
from support.engine.llama4 import CHUNK, CHUNKED, tiny_llama4
from support.engine.reference import solo_tokens
from support.engine.soak import Soak

from chairlift.cache.batch import BatchCache
from chairlift.cache.chunked import QuantizedChunkedLayer
from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import Quantization
from chairlift.cache.saved.layers import LayerTemplate, pack, template_of
from chairlift.cache.saved.nodes import fingerprint, make_node, read_node, write_node
from chairlift.cache.saved.promptfile import read_prompt_cache
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot
from chairlift.cache.speculation import Speculation


def _prompt(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB) for _ in range(length)]


def _fed(model: Any, batch: BatchCache, tokens: list[list[int]]) -> mx.array:
    """Runs a step with these tokens of each row; returns the logits."""
    with batch.step(len(tokens[0])):
        logits: mx.array = model(mx.array(tokens), cache=batch.layers)
    mx.eval(logits, batch.state)
    batch.check_integrity()
    return logits


def _one_row(model: Any, tokens: list[int], chunk: int = 5) -> BatchCache:
    batch = make_batch(model)
    batch.join()
    for start in range(0, len(tokens), chunk):
        _fed(model, batch, [tokens[start : start + chunk]])
    return batch


class Rows:
    """A batch whose keys hold token numbers, so that the tokens a query sees can be read out."""

    def __init__(self, chunk: int) -> None:
        # A window as long as the chunk shares the ring, but must not share the mask.
        self.kinds = (LayerKind(), LayerKind(chunk, chunked=True), LayerKind(chunk))
        self.batch = BatchCache(self.kinds)
        self.rows: list[list[int]] = []
        self.next = 1

    def join(self, length: int) -> None:
        """Adds two rows; their prompts are computed in one step, the shorter one padded."""
        prompts = Rows(self.kinds[1].window or 0)
        prompts.next = self.next
        for _ in range(2):
            prompts.batch.join()
            prompts.rows.append([])
        prompts.step(length, [length, length // 2 + 1])
        for row in range(2):
            self.batch.join(prompts.batch.extract(row))
        self.rows += prompts.rows
        self.next = prompts.next

    def step(self, length: int, real: list[int]) -> None:
        before = [len(row) for row in self.rows]
        for row, new in zip(self.rows, real, strict=True):
            row += range(self.next, self.next + new)
            self.next += new
        padded = [
            row[n:] + [0] * (n + length - len(row))
            for row, n in zip(self.rows, before, strict=True)
        ]
        with self.batch.step(length, real):
            for layer, kind in zip(self.batch.layers, self.kinds, strict=True):
                mask = layer.make_mask(length, None, True)
                keys, _ = layer.update_and_fetch(*tokens_to_kv(np.array(padded)))
                self._assert_seen(kind, np.array(keys[:, 0, :, 0]), np.array(mask), before)
        self.batch.check_integrity()

    def _assert_seen(
        self, kind: LayerKind, keys: np.ndarray, mask: np.ndarray, before: list[int]
    ) -> None:
        mask = np.broadcast_to(mask, (len(keys), 1, *mask.shape[2:]))
        for r, (row, start) in enumerate(zip(self.rows, before, strict=True)):
            for p in range(start, len(row)):
                visible = [q for q in range(p + 1) if _sees(kind, p, q)]
                seen = sorted(keys[r][mask[r, 0, p - start]])
                assert seen == [row[q] for q in visible], (kind, r, p)


def _sees(kind: LayerKind, query: int, key: int) -> bool:
    if kind.window is None:
        return True
    if kind.chunked:
        return query // kind.window == key // kind.window
    return query - key < kind.window


@pytest.mark.parametrize("seed", range(8))
def test_a_query_sees_its_own_chunk_and_nothing_after_it(seed: int) -> None:
    """Rows of random lengths, steps shorter and longer than the chunk, rings that wrap and grow."""
    drawn = random.Random(seed)
    rows = Rows(drawn.choice([1, 2, 5, 8, 13]))
    for _ in range(40):
        if len(rows.rows) < 5 and drawn.random() < 0.4:
            rows.join(drawn.randrange(1, 30))
        elif rows.rows and drawn.random() < 0.2:
            order = rows.batch.leave({drawn.randrange(len(rows.rows))})
            rows.rows = [rows.rows[row] for row in order]
        elif rows.rows:
            length = drawn.choice([1, 1, 1, 3, 20])
            rows.step(length, [length] * len(rows.rows))


def test_no_mask_is_made_while_all_rows_are_in_their_first_chunk() -> None:
    batch = BatchCache([CHUNKED])
    layer = batch.layers[0]
    batch.join()
    for step, mask in ((4, "causal"), (1, None), (3, "causal")):
        with batch.step(step):
            assert layer.make_mask(step) == mask
            layer.update_and_fetch(*tokens_to_kv(np.zeros((1, step))))
    with batch.step(1):
        assert layer.make_mask(1).tolist() == [[[[False] * 8 + [True]]]]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_requests_that_join_and_leave_get_their_solo_tokens(eager: bool) -> None:
    model = tiny_llama4()
    prompts = [_prompt(i, n) for i, n in enumerate((1, 3, 7, 8, 9, 16, 17, 30, 41, 60))]
    bench = Bench(model, tokens=20, eager=eager)
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt, 4 + 3 * i)
        bench.step()
        if i % 3 == 2:
            bench.step()
    bench.drain()
    for i, prompt in enumerate(prompts):
        assert bench.tokens(str(i)) == solo_tokens(model, prompt, 4 + 3 * i)


@pytest.mark.slow
def test_three_hundred_random_operations_give_the_solo_tokens() -> None:
    """Joins, leaves, snapshots, restores and rewinds at every position in a chunk."""
    soak = Soak(tiny_llama4(), [_prompt(i, n) for i, n in enumerate((1, 6, 15, 16, 17, 40))], 20, 3)
    soak.run(300)
    assert min(soak.done[name] for name in ("step", "join", "leave", "keep", "restore")) > 10
    assert soak.done["rewind"] > 3
    assert soak.refused > 3, "rewinds to tokens that have left the ring"


@pytest.mark.parametrize("at", [7, 8, 9, 15, 16, 21])
def test_a_row_is_restored_at_any_position_in_a_chunk(at: int) -> None:
    model, tokens = tiny_llama4(), _prompt(1, 30)
    expected = _fed(model, _one_row(model, tokens[:at]), [tokens[at:]])
    snapshot = _one_row(model, tokens).extract(0).copy()
    shorter = _one_row(model, tokens[:at]).extract(0).copy()
    first = shorter.layers[0]
    assert isinstance(first, KVPiece)
    assert first.tokens >= min(at, CHUNK - 1)
    batch = make_batch(model)
    batch.join(snapshot)
    batch.join(snapshot)
    batch.restore(1, shorter)
    got = _fed(model, batch, [_prompt(2, len(tokens) - at), tokens[at:]])
    assert mx.allclose(got[1], expected[0], atol=1e-4)


def test_a_row_rewinds_as_far_as_its_ring_reaches() -> None:
    model, tokens = tiny_llama4(), _prompt(1, 20)
    batch = make_batch(model)
    batch.join(columns=40)
    _fed(model, batch, [tokens])
    # After a step of 20 the ring has 27 columns: it still holds the 7 tokens before 18.
    assert batch.rewind(0, 18)
    mx.eval(batch.take_moves())
    expected = _fed(model, _one_row(model, tokens[:18]), [tokens[18:]])
    assert mx.allclose(_fed(model, batch, [tokens[18:]]), expected, atol=1e-4)
    batch = make_batch(model)
    batch.join(_one_row(model, tokens, chunk=1).extract(0))
    assert not batch.rewind(0, 10)
    assert batch.offsets == [20]


def test_speculation_crosses_the_border_of_a_chunk() -> None:
    """Rows keep different numbers of the drafts that they wrote across the border."""
    model = tiny_llama4()
    prompts, drafts = [_prompt(1, 6), _prompt(2, 21)], [_prompt(3, 5), _prompt(4, 5)]
    batch = make_batch(model)
    for prompt in prompts:
        batch.join(_one_row(model, prompt).extract(0))
    speculation = Speculation(batch)
    with speculation.step(5):
        mx.eval(model(mx.array(drafts), cache=speculation.layers))
    speculation.commit([4, 1])
    batch.check_integrity()
    kept = [[*prompts[0], *drafts[0][:4]], [*prompts[1], *drafts[1][:1]]]
    got = _fed(model, batch, [[9], [9]])
    for row, tokens in enumerate(kept):
        expected = _fed(model, _one_row(model, tokens), [[9]])
        assert mx.allclose(got[row], expected[0], atol=1e-4)


def test_prompts_continue_from_a_shared_prefix() -> None:
    model = tiny_llama4()
    bench = Bench(model, prefix=1 << 26)
    shared = _prompt(1, 45)
    for i in range(5):
        bench.submit(str(i), [*shared[: 45 - i], *_prompt(10 + i, 6)], 12)
        bench.drain()
    for i in range(5):
        prompt = [*shared[: 45 - i], *_prompt(10 + i, 6)]
        assert bench.tokens(str(i)) == solo_tokens(model, prompt, 12)
        if i:
            assert bench.outputs[str(i), 0][0].cached_tokens >= 45 - i


def test_quantized_rows_see_their_chunk_and_keep_their_bits() -> None:
    """Logits stay close to mlx-lm's; moving to another row changes no bit of the state."""
    model, tokens = (
        tiny_llama4(head_dim=32, interleave_moe_layer_step=9),
        [_prompt(1, 43), _prompt(2, 43)],
    )
    batch = make_batch(model, Quantization(8, 32))
    assert isinstance(batch.parts[0], QuantizedChunkedLayer)
    caches = [make_prompt_cache(model) for _ in tokens]
    for _ in tokens:
        batch.join()
    for start, stop in ((0, 5), (5, 26), *((i, i + 1) for i in range(26, 43))):
        new = [row[start:stop] for row in tokens]
        got = _fed(model, batch, new)
        for row, cache in enumerate(caches):
            expected = model(mx.array([new[row]]), cache=cache)
            assert mx.abs(got[row] - expected[0]).max() < 0.1 * mx.abs(expected).max()
    before = batch.extract(1).copy()
    mx.eval(before.arrays)
    assert batch.leave({0}) == [1]
    mx.eval(batch.take_moves())
    for old, moved in zip(before.layers, batch.extract(0).layers, strict=True):
        assert isinstance(old, KVPiece)
        assert isinstance(moved, KVPiece)
        assert mx.array_equal(old.keys, moved.keys)


def test_files_distinguish_chunks_from_windows(tmp_path: Path) -> None:
    model, name = fingerprint("llama4"), tmp_path / "a"
    kv = mx.random.normal((1, 2, 7, 4))
    full = mx.random.normal((1, 2, 20, 4))
    live = Snapshot(0, 20, (KVPiece(full, full), KVPiece(kv, kv), None))
    kinds = (LayerKind(), CHUNKED, CHUNKED)
    with name.open("wb") as file:
        write_node(file, make_node(model, "", range(20), 0, pack(kinds, live)))
    read = read_node(name, model, template_of(kinds, live)).snapshot()
    assert (read.start, read.stop) == (0, 20)
    for piece, other in zip(live.layers, read.layers, strict=True):
        assert (piece is None) == (other is None)
        if isinstance(piece, KVPiece) and isinstance(other, KVPiece):
            assert mx.array_equal(piece.keys, other.keys)
    for kind in (LayerKind(CHUNK), LayerKind(CHUNK + 1, chunked=True), LayerKind()):
        other = [LayerTemplate(LayerKind()), LayerTemplate(kind), LayerTemplate(CHUNKED)]
        with pytest.raises(SavedStateError, match="layer 1: ChunkedKVCache of window 8, but"):
            read_node(name, model, other)


@pytest.mark.parametrize("steps", [[3], [8], [20], [5, 1, 1, 1, 1], [20, 1, 1], [1] * 20, [9, 9]])
def test_a_row_continues_from_a_file_of_mlx_lm(tmp_path: Path, steps: list[int]) -> None:
    model, tokens = tiny_llama4(), _prompt(1, 30)
    theirs = make_prompt_cache(model)
    done = 0
    for step in steps:
        model(mx.array([tokens[done : done + step]]), cache=theirs)
        done += step
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), theirs)
    one = _one_row(model, tokens[:1])
    template = template_of(make_batch(model).kinds, one.extract(0))
    batch = make_batch(model)
    batch.join(read_prompt_cache(path, done, template))
    expected = model(mx.array([tokens[done:]]), cache=theirs)
    assert mx.allclose(_fed(model, batch, [tokens[done:]]), expected, atol=1e-4)
