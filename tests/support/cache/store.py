"""Evicted nodes whose keys hold their tokens, and helpers to put, load and find them in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.match import Evicted
from chairlift.cache.saved.nodes import fingerprint
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece
from chairlift.cache.store.index import FileSegment
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.token_ids import ids_of

KINDS = (LayerKind(), LayerKind(window=4))
MODEL = fingerprint("llama", "a")
LARGE = 1 << 30
MakeStore = Callable[..., PrefixStore]


def kv_piece(tokens: Sequence[int]) -> KVPiece:
    """Keys that hold their token ids; the values are the negative ids."""
    ids = mx.array(list(tokens), mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(ids, (1, 2, len(tokens), 4)).astype(mx.bfloat16)
    return KVPiece(keys, -ids)


def evicted_node(tokens: Sequence[int], start: int = 0, salt: str = "") -> Evicted:
    piece = kv_piece(tokens[start:])
    return evicted_with(tokens, start, salt, piece, piece)


def evicted_with(
    tokens: Sequence[int], start: int, salt: str, *layers: KVPiece | StatePiece | None
) -> Evicted:
    before = PathDigest(salt).continued(tokens[:start])
    return Evicted(ids_of(tokens[start:]), before, Snapshot(start, len(tokens), layers))


def put_all(store: PrefixStore, *nodes: Evicted) -> None:
    for node in nodes:
        assert store.put(node)
        assert store.flush(5)


def load_all(store: PrefixStore, segments: Sequence[FileSegment]) -> list[Snapshot]:
    load = store.load(segments)
    assert load.ended.wait(5)
    return load.snapshots()


def stored_files(store: PrefixStore) -> list[Path]:
    return sorted(store._files.directory.glob("*.safetensors"))


def assert_consistent(store: PrefixStore) -> None:
    assert store.nbytes == sum(path.stat().st_size for path in stored_files(store))
    assert len(store) == len(stored_files(store))
    assert not list(store._files.directory.glob(".*"))


def found_spans(store: PrefixStore, tokens: Sequence[int], at: int, salt: str = "") -> list[Any]:
    return [(s.entry.head.start, s.stop) for s in store.find(tokens, at, salt)]


PROMPT = list(range(100, 130))
