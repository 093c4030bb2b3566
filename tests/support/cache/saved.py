"""Snapshots and saved nodes for tests of their files."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from chairlift.cache.saved.layers import pack
from chairlift.cache.saved.nodes import SavedNode, fingerprint, make_node, write_node
from chairlift.cache.saved.safetensors import Tensor
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece

KINDS = (LayerKind(), LayerKind(window=4), LayerKind(recurrent=True))
MODEL = fingerprint("llama", "{}", "float32", None)
TOKENS = tuple(range(1000, 1012))
DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.uint32)


def random_values(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.uint32:
        return mx.random.randint(0, 1 << 30, shape).astype(mx.uint32)
    return mx.random.normal(shape).astype(dtype)


def kv_piece(tokens: int, dtype: mx.Dtype = mx.float32) -> KVPiece:
    return KVPiece(random_values((1, 2, tokens, 4), dtype), random_values((1, 2, tokens, 6), dtype))


def live_snapshot(start: int = 3, dtype: mx.Dtype = mx.float32) -> Snapshot:
    state = StatePiece((None, random_values((1, 3, 5), dtype), random_values((1, 2), mx.float32)))
    return Snapshot(
        start, len(TOKENS), (kv_piece(len(TOKENS) - start, dtype), kv_piece(3, dtype), state)
    )


def saved_node(snapshot: Snapshot) -> SavedNode:
    return make_node(MODEL, "tenant", TOKENS, snapshot.start, pack(KINDS, snapshot))


def write_file(path: Path, node: SavedNode) -> Path:
    with path.open("wb") as file:
        assert write_node(file, node) == file.tell()
    return path


def assert_same_snapshot(first: Snapshot, second: Snapshot) -> None:
    assert (first.start, first.stop, len(first.layers)) == (
        *(second.start, second.stop),
        len(second.layers),
    )
    for piece, other in zip(first.layers, second.layers, strict=True):
        assert type(piece) is type(other)
        if piece is None or other is None:
            continue
        if isinstance(piece, StatePiece) and isinstance(other, StatePiece):
            assert [s is None for s in piece.slots] == [s is None for s in other.slots]
        for a, b in zip(piece.arrays, other.arrays, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert bytes(memoryview(mx.contiguous(a))) == bytes(memoryview(mx.contiguous(b)))


def zeros(*shape: int, dtype: str = "F32") -> Tensor:
    kind = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I16": np.int16}[dtype]
    return Tensor(dtype, np.zeros(shape, kind))


def zero_kv(*shape: int, dtype: str = "F32") -> tuple[Tensor, Tensor]:
    return zeros(*shape, 4, dtype=dtype), zeros(*shape, 6, dtype=dtype)
