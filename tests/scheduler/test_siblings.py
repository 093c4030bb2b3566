"""Who waits for a sibling's prefix, for how long, and whom that holds up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import MAX_PASSED, NO_CAPACITY, Plan, Scheduler
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import MIN_SHARED, Followers, Sibling, sibling_of

SHARED = list(range(300))


class Line:
    """A scheduler whose prefix cache has all that was computed; counts what it is asked."""

    def __init__(self, rows: int = 8, tokens: int = 64, border: int | None = None) -> None:
        self.asked: list[str] = []
        self.known: list[list[int]] = []
        # With a border a prompt leaves the rest of a step to others.
        limits = Limits(rows, tokens, 10**7, KVGeometry(100, row_bytes=9), checkpoint=border)
        self.scheduler = Scheduler(limits, self._cached)
        self.capacities = (NO_CAPACITY,)

    def _cached(self, sequence: Sequence) -> int:
        self.asked.append(sequence.request_id)
        return max((self._common(sequence.tokens, own) for own in self.known), default=0)

    def _common(self, tokens: list[int], own: list[int]) -> int:
        pairs = zip(tokens[:-1], own, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens) - 1, len(own)))

    def add(self, name: str, prompt: list[int], most: int = 50, priority: int = 0) -> Sequence:
        sequence = Sequence(name, prompt, most, priority=priority)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.plan(self.capacities)
        self.scheduler.commit(plan)
        self.scheduler.check_integrity()
        self.capacities = plan.capacities
        self.known += [s.tokens[: s.computed] for s in plan.chunks]
        for sequence in (*plan.decode, *plan.joins):
            self.scheduler.token(sequence, 7)
        return plan


def _names(plan: Plan) -> list[str]:
    return [sequence.request_id for sequence in plan.cached]


def test_others_begin_while_one_waits_for_its_sibling() -> None:
    line = Line()
    for name in ("first", "second", "third"):
        line.add(name, [*SHARED, len(name), 0])
    line.step()
    line.add("other", [901, 902])
    # Beside the first, which takes all that a step has but a row's token.
    plans = [line.step() for _ in range(5)]
    begun = [name for plan in plans for name in _names(plan)]
    assert begun[0] == "other", "nobody waits behind who waits for another one"
    assert set(begun[1:]) == {"second", "third"}
    assert len(line.asked) == len(set(line.asked)) + 2, "who waits was asked once, and once again"


def test_who_waits_is_not_asked_again_until_there_is_something_new() -> None:
    line = Line(tokens=16)
    line.add("first", [*SHARED, 1])
    line.step()
    line.add("second", [*SHARED, 2])
    line.step()
    line.asked.clear()
    for _ in range(15):
        line.step()
    assert line.asked == []
    for _ in range(4):
        line.step()
    assert line.asked == ["second"]
    assert line.scheduler.sequences_of("second")[0].cached == 18 * 16 > len(SHARED) - MIN_SHARED


def test_what_is_shared_is_enough() -> None:
    """A sibling's own long rest is nothing to wait for."""
    line = Line(border=16)
    line.add("first", [*SHARED[:60], *range(1000, 2000)])
    line.step()
    line.add("second", [*SHARED[:60], 5, 6])
    plans = [line.step() for _ in range(4)]
    begun = [{s.request_id: n for s, n in plan.cached.items()} for plan in plans]
    assert begun == [{}, {}, {}, {"second": 60}]
    line.add("third", [*SHARED[:60], 7, 8])
    line.add("long", [*SHARED[:60], *range(1000, 2000)])
    plan = line.step()
    assert {s.request_id: n for s, n in plan.cached.items()} == {"third": 60}
    assert line.scheduler.sequences_of("long")[0] in line.scheduler.waiting, (
        "it shares more with the first"
    )


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_whose_sibling_is_gone_begins(how: str) -> None:
    line = Line(tokens=16)
    first = line.add("first", [*SHARED, 1])
    line.step()
    line.add("second", [*SHARED, 2])
    line.step()
    assert not line.scheduler.waiting.idle
    if how == "aborted":
        line.scheduler.finish(first)
    else:
        line.scheduler.commit(Plan(preempted=[first]))
    assert _names(line.step())[0] == ("second" if how == "aborted" else "first")


def test_who_waits_for_a_sibling_can_be_aborted() -> None:
    line = Line(tokens=16)
    line.add("first", [*SHARED, 1])
    line.step()
    second = line.add("second", [*SHARED, 2])
    line.step()
    assert second in line.scheduler.waiting
    line.scheduler.finish(second)
    line.scheduler.check_integrity()
    assert (len(line.scheduler.waiting), line.scheduler.waiting.choices) == (0, 0)
    for _ in range(30):
        assert "second" not in _names(line.step())


def test_an_urgent_request_waits_for_nobody_who_is_due_later() -> None:
    """Others might overtake the one it waits for."""
    line = Line(tokens=32)
    line.add("first", [*SHARED, 1], priority=5)
    line.step()
    line.add("urgent", [*SHARED, 2])
    plan = line.step()
    assert {s.request_id: n for s, n in plan.cached.items()} == {"urgent": 32}


def test_a_thousand_alike_cost_each_step_a_few_looks() -> None:
    line = Line(rows=4, border=16)
    line.add("first", [*SHARED, 1])
    line.step()
    for number in range(1000):
        line.add(str(number), [*SHARED, number])
    for _ in range(6):
        line.asked.clear()
        line.step()
        assert 0 < len(line.asked) <= MAX_PASSED


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_sibling_is_the_one_that_is_about_to_compute_most(data: st.DataObject) -> None:
    lists = st.lists(st.integers(0, 1), min_size=1, max_size=4)
    repeated = st.builds(lambda few: [t for t in few for _ in range(25)], lists)
    own = Sequence("own", data.draw(repeated), 1, number=9)
    others = []
    for number, tokens in enumerate(data.draw(st.lists(repeated, max_size=4))):
        salt = data.draw(st.sampled_from(["", "", "other"]))
        other = Sequence(str(number), tokens, 1, number=data.draw(st.integers(0, 18)))
        other.cache_salt, other.computed = salt, data.draw(st.integers(0, len(tokens)))
        others.append(other)
    cached = data.draw(st.integers(0, len(own.tokens) - 1))
    worth = []
    for other in others:
        pairs = zip(own.tokens, other.tokens, strict=False)
        most = min(len(own.tokens), len(other.tokens))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), most)
        # The prefix cache gives of a prompt only what begins like it.
        assert shared >= 0
        gains = shared >= cached + MIN_SHARED and other.computed < shared
        if gains and other.cache_salt == "" and other.number <= 9:
            worth.append(shared)
    found = sibling_of(own, cached, others)
    assert (found.shared if found else 0) == max(worth, default=0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_followers_come_back_when_their_sibling_has_come_as_far(seed: int) -> None:
    rng = random.Random(seed)
    leaders = [Sequence(f"leader {n}", [1] * 50, 1, computed=1) for n in range(3)]
    followers, waiting = Followers(), dict[Sequence, Sibling]()
    for number in range(60):
        action = rng.random()
        if action < 0.5:
            sequence = Sequence(str(number), [1] * 50, 1, number=number)
            waiting[sequence] = Sibling(rng.choice(leaders), rng.randrange(2, 51))
            followers.add(sequence, waiting[sequence])
        elif action < 0.7 and waiting:
            gone = rng.choice(list(waiting))
            followers.remove(gone)
            del waiting[gone]
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
