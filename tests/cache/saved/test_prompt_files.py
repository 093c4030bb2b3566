"""mlx-lm's prompt caches: read, and refused where they break a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)
from support.cache.saved import assert_same_snapshot
from support.tiny import tiny_model

from chairlift.cache.kinds import make_batch
from chairlift.cache.saved.layers import template_of
from chairlift.cache.saved.promptfile import read_prompt_cache
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import KVPiece, Snapshot, StatePiece


def feed(cache: Any, steps: list[int], heads: int = 2, dim: int = 4) -> mx.array:
    """Feeds random keys, which are also the values, in steps of these lengths; returns them."""
    keys = mx.random.normal((1, heads, sum(steps), dim))
    at = 0
    for step in steps:
        cache.update_and_fetch(keys[:, :, at : at + step], keys[:, :, at : at + step])
        at += step
    return keys


@pytest.mark.parametrize(
    "steps", [[5], [1] * 5, [8], [20], [1] * 20, [7, 1, 1, 1], [20, 1, 1, 1], [3, 9, 1], [20, 4]]
)
def test_rotating_caches_of_mlx_lm_are_read_in_temporal_order(
    tmp_path: Path, steps: list[int]
) -> None:
    full, rotating = KVCache(), RotatingKVCache(8)
    keys, wrapped = feed(full, steps), feed(rotating, steps)
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), [full, rotating], {"model": "x"})
    snapshot = read_prompt_cache(path)
    assert (snapshot.start, snapshot.stop) == (0, sum(steps))
    piece, window = snapshot.layers
    assert isinstance(piece, KVPiece)
    assert isinstance(window, KVPiece)
    assert window.tokens >= min(7, sum(steps))
    assert mx.array_equal(piece.keys, keys)
    assert mx.array_equal(window.values, wrapped[:, :, -window.tokens :])


def test_states_and_nested_caches_of_mlx_lm_are_read(tmp_path: Path) -> None:
    arrays, inner, kv = ArraysCache(2), ArraysCache(1), KVCache()
    arrays[1] = mx.random.normal((1, 3)).astype(mx.bfloat16)
    inner[0] = mx.random.normal((1, 2, 2))
    keys = feed(kv, [6])
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), [arrays, CacheList(inner, kv), ArraysCache(2)])
    expected = (
        StatePiece((None, arrays[1])),
        StatePiece((inner[0],)),
        KVPiece(keys, keys),
        None,
    )
    assert_same_snapshot(read_prompt_cache(path), Snapshot(0, 6, expected))
    with pytest.raises(SavedStateError, match="differ"):
        read_prompt_cache(path, tokens=7)
    save_prompt_cache(str(path), [arrays])
    with pytest.raises(SavedStateError, match="all recurrent"):
        read_prompt_cache(path)
    assert read_prompt_cache(path, tokens=9).stop == 9


@pytest.mark.parametrize("prompt", [5, 40])
def test_a_model_continues_from_its_mlx_lm_file(tmp_path: Path, prompt: int) -> None:
    model = tiny_model("gemma3", sliding_window=16)
    theirs, batch = make_prompt_cache(model), make_batch(model)
    tokens = mx.array([[(7 * i) % 200 + 3 for i in range(prompt + 21)]])
    model(tokens[:, :prompt], cache=theirs)
    for i in range(prompt, prompt + 20):
        model(tokens[:, i : i + 1], cache=theirs)
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), theirs)
    batch.join(Snapshot(0, 0, (None,) * len(theirs)))
    with batch.step(1):
        mx.eval(model(tokens[:, :1], cache=batch.layers))
    template = template_of(make_batch(model).kinds, batch.extract(0))
    batch.reset()
    batch.join(read_prompt_cache(path, prompt + 20, template))
    with batch.step(1):
        ours = model(tokens[:, -1:], cache=batch.layers)
    assert mx.allclose(ours, model(tokens[:, -1:], cache=theirs), atol=1e-4)


def test_files_of_older_mlx_lm_versions_are_read(tmp_path: Path) -> None:
    rotating = RotatingKVCache(8)
    full, wrapped = mx.random.normal((1, 2, 20, 4)), feed(rotating, [1] * 20)
    path = tmp_path / "a.safetensors"
    names = ("0.0", "0.1", "1.0", "1.1", "2.0")
    arrays = (full, full, rotating.keys, rotating.values, mx.ones((1, 3)))
    meta = dict(zip(("0.1.0", "0.1.1", "0.1.2", "0.1.3"), ("0", "8", "20", "4"), strict=True))
    kinds = {"2.0": "KVCache", "2.1": "RotatingKVCache", "2.2": "MambaCache"}
    metadata = {"0.0": "", "0.2": "", "1.model": "x"} | meta | kinds
    mx.save_safetensors(str(path), dict(zip(names, arrays, strict=True)), metadata)
    snapshot = read_prompt_cache(path)
    newest = wrapped[:, :, -8:]
    expected = (KVPiece(full, full), KVPiece(newest, newest), StatePiece((mx.ones((1, 3)),)))
    assert_same_snapshot(snapshot, Snapshot(0, 20, expected))


def fed_cache(kind: Any, steps: list[int], **changes: Any) -> Any:
    feed(kind, steps)
    for name, value in changes.items():
        setattr(kind, name, value)
    return kind


PROMPT_FAULTS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "quantized": (
        lambda: [QuantizedKVCache()],
        "QuantizedKVCache is not supported",
    ),
    "chunk beyond": (lambda: [fed_cache(ChunkedKVCache(8), [3], offset=300)], "has 256 of .0, 300"),
    "chunk ahead": (lambda: [fed_cache(ChunkedKVCache(8), [3], start_position=4)], "of .4, 3"),
    "chunk too short": (
        lambda: [fed_cache(ChunkedKVCache(4), [3], start_position=1)],
        "has .1, 3., but chunks of 4",
    ),
    "no chunk": (lambda: [fed_cache(ChunkedKVCache(0), [3])], "chunks of 0"),
    "unknown": (lambda: [type("Odd", (KVCache,), {})()], "'Odd' is unknown .known: KVCache"),
    "kept": (lambda: [fed_cache(RotatingKVCache(8, keep=4), [3])], "4 tokens kept for good"),
    "offset": (lambda: [fed_cache(KVCache(), [3], offset=257)], "offset 257 of 256"),
    "no number": (lambda: [fed_cache(KVCache(), [3], offset=1.5)], "no number"),
    "offsets": (lambda: [fed_cache(KVCache(), [3]), fed_cache(KVCache(), [4])], "offsets differ"),
    "cursor": (lambda: [fed_cache(RotatingKVCache(8), [20], _idx=21)], "cursor at 21"),
    "cursor in room": (
        lambda: [fed_cache(RotatingKVCache(300), [1] * 5, _idx=4)],
        "its cursor at 4",
    ),
    "wraps early": (lambda: [fed_cache(RotatingKVCache(8), [5], _idx=2)], "wraps at 5"),
    "max_size": (lambda: [fed_cache(RotatingKVCache(8), [3], max_size=0)], "max_size of 0"),
    "too little": (lambda: [fed_cache(RotatingKVCache(8), [5], offset=9)], "5 of the 8 tokens"),
    "empty": (lambda: [fed_cache(RotatingKVCache(8), [], offset=3)], "is empty, but at 3"),
    "padded": (lambda: [ArraysCache(1, left_padding=[2])], "left padding"),
    "nothing": (lambda: [], "no caches"),
}


@pytest.mark.parametrize("fault", PROMPT_FAULTS)
def test_a_prompt_file_that_breaks_a_rule_is_refused(tmp_path: Path, fault: str) -> None:
    make, message = PROMPT_FAULTS[fault]
    path = tmp_path / "a.safetensors"
    caches = make()
    if caches:
        save_prompt_cache(str(path), caches)
    else:
        mx.save_safetensors(str(path), {"a": mx.zeros(1)}, {"2.0": ""})
    with pytest.raises(SavedStateError, match=message):
        read_prompt_cache(path)


def test_truncated_and_flipped_prompt_files_never_crash(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.safetensors", random.Random(1)
    caches = [KVCache(), RotatingKVCache(8), ArraysCache(2)]
    feed(caches[0], [20])
    feed(caches[1], [1] * 20)
    save_prompt_cache(str(path), caches)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(400):
        data = bytearray(content)
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
        with suppress(SavedStateError):
            read_prompt_cache(path)
