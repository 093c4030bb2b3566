"""Snapshots whose numbers name their prefix, and prefix trees filled with them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.match import Evicted, Match
from chairlift.cache.prefix.tree import PrefixTree
from chairlift.cache.snapshot import (
    KVPiece,
    LayerKind,
    LayerState,
    Snapshot,
    StatePiece,
    merged,
    resumable,
)

FULL, WINDOW, STATE = LayerKind(), LayerKind(window=4), LayerKind(recurrent=True)
MIXTURES = {
    "full": [FULL, FULL],
    "full and windows": [FULL, WINDOW, LayerKind(window=7)],
    "full and recurrent": [FULL, STATE, STATE],
    "windows": [WINDOW, LayerKind(window=1), WINDOW],
    "all": [FULL, WINDOW, STATE],
}
# Bytes that one token or one state of the tests' layers takes.
TOKEN, STATE_BYTES = (2 * 3 + 2 * 1) * 4, (3 + 3) * 4

Prefix = tuple[int, ...]
# Digest of a path -> its salt and tokens, for every snapshot that a test has inserted.
PATHS: dict[str, tuple[str, Prefix]] = {}


def prefix_number(prefix: Prefix, salt: str = "") -> int:
    """A number that identifies a prefix, small enough to be exact as a float32."""
    return zlib.crc32(repr((salt, prefix)).encode()) % 2**23


def prefix_numbers(tokens: Prefix, start: int, salt: str) -> list[int]:
    return [prefix_number(tokens[: i + 1], salt) for i in range(start, len(tokens))]


def kv_piece(layer: int, tokens: Prefix, start: int, salt: str = "") -> KVPiece:
    """Keys and values of ``tokens[start:]``; a key holds its layer, position and prefix number."""
    rows = [
        [layer, start + i, number] for i, number in enumerate(prefix_numbers(tokens, start, salt))
    ]
    keys = np.array([rows, np.negative(rows)], np.float32)[None]
    return KVPiece(mx.array(keys), mx.array(keys[..., 2:] + 0.5))


def state_piece(layer: int, tokens: Prefix, salt: str = "") -> StatePiece:
    numbers = [layer, len(tokens), prefix_number(tokens, salt)]
    return StatePiece((mx.array([numbers], mx.float32), None, -mx.array([numbers], mx.float32)))


def snapshot_of(
    kinds: Sequence[LayerKind],
    tokens: Iterable[int],
    start: int = 0,
    window: int | None = None,
    states: bool = True,
    salt: str = "",
) -> Snapshot:
    """A snapshot of ``tokens[start:]``.

    Args:
        window: window layers hold only that many of the newest tokens; None: all of them.
        states: recurrent layers hold the state at the end.
    """
    tokens = tuple(tokens)
    layers: list[LayerState | None] = []
    for i, kind in enumerate(kinds):
        oldest = start
        if kind.window is not None and window is not None:
            oldest = max(start, len(tokens) - window)
        if kind.recurrent:
            layers.append(state_piece(i, tokens, salt) if states and tokens else None)
        else:
            layers.append(kv_piece(i, tokens, oldest, salt) if oldest < len(tokens) else None)
    return Snapshot(start, len(tokens), tuple(layers))


def assert_same_snapshot(first: Snapshot, second: Snapshot) -> None:
    assert (first.start, first.stop) == (second.start, second.stop)
    for piece, other in zip(first.layers, second.layers, strict=True):
        assert type(piece) is type(other)
        if piece is not None and other is not None:
            for one, two in zip(piece.arrays, other.arrays, strict=True):
                assert np.array_equal(np.array(one), np.array(two))


def assert_matches(tree: PrefixTree, tokens: Prefix, length: int, **more: Any) -> Match:
    """The match has this length, and its snapshot is all that a sequence needs to resume there."""
    match = tree.match(tokens, **more)
    assert match.length == length
    got = match.snapshot()
    salt = more.get("salt", "")
    assert_same_snapshot(
        got, merged(tree.kinds, [snapshot_of(tree.kinds, tokens[:length], salt=salt)])
    )
    assert resumable(tree.kinds, [got])
    tree.check_integrity()
    return match


@cache
def record_path(salt: str, tokens: Prefix) -> None:
    for stop in range(len(tokens) + 1):
        prefix = tokens[:stop]
        PATHS[PathDigest(salt).continued(prefix).hexdigest()] = salt, prefix


def evicted_path(evicted: Evicted) -> tuple[str, Prefix]:
    """The salt of an evicted node, and all tokens from the root to the node's end."""
    salt, before = PATHS[evicted.before.hexdigest()]
    assert len(before) == evicted.start
    return salt, (*before, *evicted.edge)


def evicted_tokens(evicted: Evicted) -> Prefix:
    return evicted_path(evicted)[1]


def make_tree(kinds: Sequence[LayerKind], budget: int = 10**6) -> tuple[PrefixTree, list[Evicted]]:
    evicted: list[Evicted] = []
    return PrefixTree(kinds, budget, evicted.append), evicted


def insert(tree: PrefixTree, tokens: Prefix, start: int = 0, **more: Any) -> bool:
    record_path(more.get("salt", ""), tuple(tokens))
    put = tree.insert(tokens, snapshot_of(tree.kinds, tokens, start, **more), more.get("salt", ""))
    tree.check_integrity()
    return put


# Two prompts with a system prompt of 8 tokens in common.
SYSTEM = tuple(range(8))
ONE, TWO = (*SYSTEM, 20, 21, 22, 23), (*SYSTEM, 30, 31, 32)
