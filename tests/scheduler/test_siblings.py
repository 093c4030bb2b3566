"""Requests that wait for a sibling to compute the prefix that they share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import MIN_SHARED, Sibling, SiblingFollowers, sibling_of
from chairlift.scheduler.step_prompts import MAX_PASSED

SHARED = list(range(300))


class CachingLoop:
    """Steps a scheduler whose prefix cache keeps every computed prompt.

    Attributes:
        lookups: ids of the requests that were looked up in the prefix cache.
        computed: the prefixes that are in the cache.
    """

    def __init__(self, rows: int = 8, tokens: int = 64, border: int | None = None) -> None:
        self.lookups: list[str] = []
        self.computed: list[list[int]] = []
        # A checkpoint at each border ends chunks there; the rest of the step is left to others.
        limits = Limits(rows, tokens, 10**7, KVGeometry(100, row_bytes=9), checkpoint=border)
        self.scheduler = Scheduler(limits, self._cached)
        self.capacities = (NO_CAPACITY,)

    def _cached(self, sequence: Sequence) -> int:
        self.lookups.append(sequence.request_id)
        return max((self._common(sequence.tokens, prefix) for prefix in self.computed), default=0)

    def _common(self, tokens: list[int], prefix: list[int]) -> int:
        pairs = zip(tokens[:-1], prefix, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens) - 1, len(prefix))
        )

    def add(self, name: str, prompt: list[int], outputs: int = 50, priority: int = 0) -> Sequence:
        sequence = Sequence(name, prompt, outputs, priority=priority)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.plan(self.capacities)
        self.scheduler.commit(plan)
        self.scheduler.check_integrity()
        self.capacities = plan.capacities
        self.computed += [s.tokens[: s.computed] for s in plan.chunks]
        for sequence in (*plan.decode, *plan.joins):
            self.scheduler.read(sequence, [7])
        return plan


def _names(plan: Plan) -> list[str]:
    return [sequence.request_id for sequence in plan.cached]


def test_other_requests_begin_while_one_waits_for_its_sibling() -> None:
    loop = CachingLoop()
    for name in ("first", "second", "third"):
        loop.add(name, [*SHARED, len(name), 0])
    loop.step()
    loop.add("other", [901, 902])
    # The first prompt takes all of each step but one row's token.
    plans = [loop.step() for _ in range(5)]
    begun = [name for plan in plans for name in _names(plan)]
    assert begun[0] == "other", "a waiting follower does not block the queue"
    assert set(begun[1:]) == {"second", "third"}
    # When a request becomes ready and when it could begin; followers become ready twice.
    looked_up = Counter(loop.lookups)
    assert looked_up == {"first": 2, "other": 2, "second": 4, "third": 4}


def test_a_follower_is_not_looked_up_again_before_its_prefix_is_computed() -> None:
    loop = CachingLoop(tokens=16)
    loop.add("first", [*SHARED, 1])
    loop.step()
    loop.add("second", [*SHARED, 2])
    loop.step()
    loop.lookups.clear()
    for _ in range(15):
        loop.step()
    assert loop.lookups == []
    for _ in range(4):
        loop.step()
    assert loop.lookups == ["second"]
    assert loop.scheduler.sequences_of("second")[0].cached == 18 * 16 > len(SHARED) - MIN_SHARED


def test_a_follower_waits_only_for_the_shared_prefix() -> None:
    """It does not wait for the rest of its sibling's prompt."""
    loop = CachingLoop(border=16)
    loop.add("first", [*SHARED[:60], *range(1000, 2000)])
    loop.step()
    loop.add("second", [*SHARED[:60], 5, 6])
    plans = [loop.step() for _ in range(4)]
    begun = [{s.request_id: n for s, n in plan.cached.items()} for plan in plans]
    assert begun == [{}, {}, {}, {"second": 60}]
    loop.add("third", [*SHARED[:60], 7, 8])
    loop.add("long", [*SHARED[:60], *range(1000, 2000)])
    plan = loop.step()
    assert {s.request_id: n for s, n in plan.cached.items()} == {"third": 60}
    assert loop.scheduler.sequences_of("long")[0] in loop.scheduler.waiting, (
        "it waits for the longer prefix of the first"
    )


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_follower_begins_once_its_sibling_is_gone(how: str) -> None:
    loop = CachingLoop(tokens=16)
    first = loop.add("first", [*SHARED, 1])
    loop.step()
    loop.add("second", [*SHARED, 2])
    loop.step()
    assert not loop.scheduler.waiting.idle
    if how == "aborted":
        loop.scheduler.finish(first)
    else:
        loop.scheduler.commit(Plan(preempted=[first]))
    assert _names(loop.step())[0] == ("second" if how == "aborted" else "first")


def test_a_follower_can_be_aborted() -> None:
    loop = CachingLoop(tokens=16)
    loop.add("first", [*SHARED, 1])
    loop.step()
    second = loop.add("second", [*SHARED, 2])
    loop.step()
    assert second in loop.scheduler.waiting
    loop.scheduler.finish(second)
    loop.scheduler.check_integrity()
    assert (len(loop.scheduler.waiting), loop.scheduler.waiting.choices) == (0, 0)
    for _ in range(30):
        assert "second" not in _names(loop.step())


def test_an_urgent_request_waits_for_no_sibling_that_is_due_later() -> None:
    """Other requests might overtake that sibling."""
    loop = CachingLoop(tokens=32)
    loop.add("first", [*SHARED, 1], priority=5)
    loop.step()
    loop.add("urgent", [*SHARED, 2])
    plan = loop.step()
    assert {s.request_id: n for s, n in plan.cached.items()} == {"urgent": 32}


def test_a_thousand_followers_cost_each_step_a_few_lookups() -> None:
    loop = CachingLoop(rows=4, border=16)
    loop.add("first", [*SHARED, 1])
    loop.step()
    for number in range(1000):
        loop.add(str(number), [*SHARED, number])
    loop.step()
    assert len(loop.lookups) < 1000 + 3 * MAX_PASSED, "each is looked up when it is queued"
    for _ in range(6):
        loop.lookups.clear()
        loop.step()
        assert 0 < len(loop.lookups) <= MAX_PASSED


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_sibling_is_the_sequence_that_will_compute_the_longest_shared_prefix(
    data: st.DataObject,
) -> None:
    lists = st.lists(st.integers(0, 1), min_size=1, max_size=4)
    repeated = st.builds(lambda values: [t for t in values for _ in range(25)], lists)
    sequence = Sequence("follower", data.draw(repeated), 1, number=9)
    others = []
    for number, tokens in enumerate(data.draw(st.lists(repeated, max_size=4))):
        salt = data.draw(st.sampled_from(["", "", "other"]))
        other = Sequence(str(number), tokens, 1, number=data.draw(st.integers(0, 18)))
        other.cache_salt, other.computed = salt, data.draw(st.integers(0, len(tokens)))
        others.append(other)
    cached = data.draw(st.integers(0, len(sequence.tokens) - 1))
    useful = []
    for other in others:
        pairs = zip(sequence.tokens, other.tokens, strict=False)
        shorter = min(len(sequence.tokens), len(other.tokens))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        gains = shared >= cached + MIN_SHARED and other.computed < shared
        if gains and other.cache_salt == "" and other.number <= 9:
            useful.append(shared)
    found = sibling_of(sequence, cached, others)
    assert (found.shared if found else 0) == max(useful, default=0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_followers_are_ready_once_their_sibling_has_computed_the_prefix(seed: int) -> None:
    rng = random.Random(seed)
    leaders = [Sequence(f"leader {n}", [1] * 50, 1, computed=1) for n in range(3)]
    followers, waiting = SiblingFollowers(), dict[Sequence, Sibling]()
    for number in range(60):
        action = rng.random()
        if action < 0.5:
            sequence = Sequence(str(number), [1] * 50, 1, number=number)
            waiting[sequence] = Sibling(rng.choice(leaders), rng.randrange(2, 51))
            followers.add(sequence, waiting[sequence])
        elif action < 0.7 and waiting:
            removed = rng.choice(list(waiting))
            followers.remove(removed)
            del waiting[removed]
        else:
            leader = rng.choice(leaders)
            leader.computed = rng.choice([0, min(50, leader.computed + rng.randrange(9))])
            leader.finished = rng.random() < 0.02
        ready = followers.take_ready()
        expected = {s for s, sibling in waiting.items() if not sibling.computing}
        assert set(ready) == expected
        assert len(ready) == len(expected)
        for sequence in ready:
            del waiting[sequence]
        assert set(followers) == set(waiting)
        followers.check_integrity()
