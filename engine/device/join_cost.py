"""Measures the time that a row needs to join a batch of few or many running rows.

``python -m chairlift.engine.device.join_cost``. Layers, heads and dimensions are the default
model's; each joining row has 100 tokens. Exit code 1 if joining 32 rows takes at least 1.5 times as
long as joining 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import mlx.core as mx

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot

LAYERS, HEADS, DIM = 30, 3, 64
TOKENS = 100
COLUMNS = 256
JOINS = 40
LIMIT = 1.5


def join_milliseconds(running: int) -> float:
    """The median time of joining ``running`` rows, in milliseconds."""
    kv = mx.random.normal((1, HEADS, TOKENS, DIM))
    joiner = Snapshot(0, TOKENS, tuple(KVPiece(kv, kv) for _ in range(LAYERS)))
    batch = BatchCache([LayerKind()] * LAYERS)
    batch.resize(Capacity(running + 1, COLUMNS))
    for _ in range(running):
        batch.join(joiner)
    mx.eval(batch.state)
    times = []
    for _ in range(JOINS):
        start = time.perf_counter()
        row = batch.join(joiner)
        mx.eval(batch.state)
        times.append((time.perf_counter() - start) * 1e3)
        batch.leave({row})
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both costs and their ratio."""
    argparse.ArgumentParser(
        prog="python -m chairlift.engine.device.join_cost", description=__doc__
    ).parse_args(argv)
    few, many = join_milliseconds(2), join_milliseconds(32)
    print(f"a row joins  2 running rows: {few:.2f} ms")
    print(f"a row joins 32 running rows: {many:.2f} ms")
    print(f"ratio: {many / few:.2f} (limit {LIMIT})")
    return 0 if many / few < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
