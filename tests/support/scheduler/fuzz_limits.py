"""Random limits of a scheduler, for every kind of model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.drafts import Chosen
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

GEOMETRIES = (
    KVGeometry(100, {}, 0, {None: 50}),
    KVGeometry(300, {}, 0, {None: 10}),
    KVGeometry(60, {32: 50}, 0, {None: 6, 32: 25}),
    KVGeometry(20, {16: 90, 100: 30}, 0, {None: 2, 16: 9, 100: 3}),
    KVGeometry(0, {48: 80}, 0, {48: 40}),
)
RECURRENT = (
    KVGeometry(100, {}, 3000, {None: 50}),
    KVGeometry(0, {}, 2000),
    KVGeometry(40, {32: 40}, 500, {None: 20, 32: 20}),
)


def draw_limits(rng: random.Random, paged: bool = False) -> Limits:
    """Limits under which a prompt of 64 tokens fits alone, and seldom much more."""
    recurrent = rng.random() < 0.25
    geometry = rng.choice(RECURRENT if recurrent else GEOMETRIES)
    rows = rng.choice([1, 2, 4, 6, 8, 12])
    limits = Limits(
        max_rows=rows,
        max_step_tokens=rows + rng.choice([8, 40, 130, 300, 1024]),
        kv_bytes=1 << 60,
        geometry=geometry,
        checkpoint=rng.choice([16, 64]) if recurrent else None,
        chunk_multiple=rng.choice([1, 2, 8, 64, 128, rng.randrange(1, 129)]),
        max_scored=rng.choice([1, 20, 512]),
        avoid_partial_prefill=rng.random() < 0.5,
        lookahead_columns=rng.choice([0, 0, 64, 512]),
        step_seconds=rng.choice([math.inf, math.inf, math.inf, 0.03, 1e-4]),
        max_step_stretch=rng.choice([0.0, 1.75]),
        bands=1 if recurrent or paged else rng.randrange(1, 5),
        band_bytes=rng.choice([1, 5_000, 50_000]),
        ageing=rng.choice([0.1, 10.0]),
        bypass=rng.choice([0.0, 0.5, 2.0, 1000.0]),
        prefill_slack=rng.choice([0.0, 0.5, 4.0, 1000.0]),
        paged=paged,
        draft_tokens=0 if paged else rng.choice([0, 0, 1, 4]),
    )
    longest = rng.choice([130, 200, 220, 300, 500])
    kv_bytes = int(limits.bytes_alone(longest) * rng.choice([1, 1, 1.25, 1.5, 2]))
    if limits.pages:
        # Memory that no sequence has: the first page of each pool, the states of other rows.
        unused = 64 * geometry.bytes_per_token
        kv_bytes += unused + (limits.pages.states or 0) * geometry.row_bytes
    return replace(limits, kv_bytes=kv_bytes)


def draw_drafts(rng: random.Random, limits: Limits, running: Iterable[Sequence]) -> Chosen:
    """Drafts for some rows, which may reach the end of their sequences."""
    rows, chosen = list(running), {}
    room = limits.max_step_tokens - len(rows)
    for sequence in rows:
        left = sequence.max_total_tokens - sequence.num_tokens - 1
        most = min(limits.draft_tokens, left, room)
        if most > 0 and rng.random() < 0.7:
            chosen[sequence] = [7] * rng.randrange(1, most + 1)
            room -= len(chosen[sequence])
    return chosen
