"""Memory limits: what fits alone, and the error for what does not."""

from __future__ import annotations

import pytest
from support.scheduler.loop import GEOMETRY, EngineLoop, make_limits, make_sequence

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.scheduler import Scheduler


@pytest.mark.parametrize(
    ("rows", "tokens", "kv", "named"),
    [(0, 64, 10**6, "max-rows"), (8, 8, 10**6, "max-step-tokens"), (8, 64, 9_000, "kv-memory")],
)
def test_unusable_limits_are_refused(rows: int, tokens: int, kv: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Limits(rows, tokens, kv, GEOMETRY)


@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        KVGeometry(10, {32: 500}, 700, {None: 10, 32: 250}),
        KVGeometry(70, {}, 90, {None: 35}),
    ],
)
def test_max_context_is_exactly_what_fits_alone(geometry: KVGeometry) -> None:
    limits = Limits(4, 24, 60_000, geometry)
    longest = limits.max_context
    assert limits.bytes_alone(longest) <= limits.kv_bytes < limits.bytes_alone(longest + 1)
    for outputs in (0, 1, 3, longest - 1):
        loop = EngineLoop(limits)
        loop.scheduler.add(make_sequence("alone", longest - outputs, outputs))
        loop.drain()
        assert (len(loop.finished), loop.preemptions) == (1, 0)
    scheduler = Scheduler(limits)
    scheduler.add(make_sequence("too long", longest, outputs=1))
    assert not scheduler.plan([NO_CAPACITY]).chunks, "it fits at no time"


@pytest.mark.parametrize("paged", [False, True], ids=["columns", "pages"])
def test_two_requests_that_fit_only_alone_are_both_served(paged: bool) -> None:
    """A preempted request is computed again, whatever its length."""
    loop = EngineLoop(make_limits(kv=60_000, paged=paged))
    longest = loop.scheduler.limits.max_context
    for name in "ab":
        loop.scheduler.add(make_sequence(name, 9, longest - 9))
    loop.drain()
    assert loop.preemptions > 0
    assert [len(s.tokens) for s in loop.finished] == [longest, longest]


def test_a_shortage_is_explained_in_numbers() -> None:
    limits = Limits(4, 24, 60_000, KVGeometry(100, {32: 50}, 700))
    windows = (32 - 1 + 24) * 50 + 32 * 50
    needed = 2 * (300 * 100 + 700) + windows
    assert limits.bytes_alone(301) == needed
    assert limits.shortage(301) == (
        f"301 tokens need {needed} bytes of KV memory, alone, and there are 60000 (100 bytes a "
        "token in full-attention layers, 50 bytes a token in layers with a window of 32 tokens, "
        f"700 bytes a row in recurrent layers); {limits.max_context} tokens are the most"
    )
    assert "recurrent" not in Limits(4, 24, 60_000, KVGeometry(100)).shortage(301)
