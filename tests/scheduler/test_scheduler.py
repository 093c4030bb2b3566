"""The scheduler's plans: chunks, joins, aborts, blocked requests, and what a decision costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.loop import GEOMETRY, EngineLoop, make_limits, make_sequence

from chairlift.cache.capacity import Capacity, KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kv=st.sampled_from([60_000, 200_000, 2_000_000]),
    paged=st.booleans(),
)
def test_every_request_is_served_within_the_limits(seed: int, kv: int, paged: bool) -> None:
    random_ = random.Random(seed)
    loop = EngineLoop(make_limits(kv=kv, paged=paged))
    longest = loop.scheduler.limits.max_context
    expected = 0
    for number in range(20):
        prompt = random_.randrange(1, min(300, longest - 1))
        outputs = random_.randrange(1, min(150, longest - prompt + 1))
        n = random_.choice([1, 1, 1, 3, 11])
        expected += n * outputs
        priority = random_.choice([0, 0, -2, 1, 100])
        loop.scheduler.add(make_sequence(str(number), prompt, outputs, n, priority, float(number)))
        for _ in range(random_.randrange(8)):
            loop.step()
    loop.drain()
    assert sum(len(s.tokens) - s.prompt_tokens for s in loop.finished) == expected
    assert len(set(map(id, loop.finished))) == len(loop.finished)


def test_a_long_prompt_never_takes_more_than_its_chunk_of_a_step() -> None:
    loop = EngineLoop(make_limits(tokens=24))
    loop.scheduler.add(make_sequence("running", 3, outputs=200))
    loop.step()
    loop.scheduler.add(make_sequence("long", 400))
    plans = [loop.step() for _ in range(17)]
    assert all(len(plan.decode) == 1 for plan in plans), "the running row misses no step"
    assert all(plan.prefill_tokens == 23 for plan in plans)
    assert not any(plan.joins for plan in plans)
    assert len(loop.step().joins) == 1, "400 tokens, 23 a step"


def test_prompts_of_any_length_share_a_step() -> None:
    loop = EngineLoop(make_limits())
    for name, prompt in (("a", 5), ("b", 40), ("c", 14), ("d", 30)):
        loop.scheduler.add(make_sequence(name, prompt))
    plan = loop.step()
    assert list(plan.chunks.values()) == [5, 40, 14, 5]
    assert [s.request_id for s in plan.joins] == ["a", "b", "c"]
    plan = loop.step()
    assert [s.request_id for s in plan.decode] == ["a", "b", "c"]
    assert [(s.request_id, n) for s, n in plan.chunks.items()] == [("d", 25)]


def test_a_partial_prompt_continues_before_the_next_one_begins() -> None:
    loop = EngineLoop(make_limits())
    for name in "abc":
        loop.scheduler.add(make_sequence(name, 40))
    plans = [loop.step() for _ in range(2)]
    assert [list(plan.chunks.values()) for plan in plans] == [[40, 24], [16, 40]]
    assert [s.request_id for s in plans[1].joins] == ["b", "c"]


def test_a_prompt_does_not_begin_with_less_than_a_full_step() -> None:
    loop = EngineLoop(
        Limits(8, 64, 2_000_000, GEOMETRY, chunk_multiple=8, avoid_partial_prefill=True)
    )
    for name, prompt in (("a", 40), ("b", 30), ("c", 100), ("d", 4)):
        loop.scheduler.add(make_sequence(name, prompt))
    plans = [loop.step() for _ in range(4)]
    chunks = [{s.request_id: n for s, n in plan.chunks.items()} for plan in plans]
    # Beside "a" only 16 tokens of "b" would fit, beside "b" only 40 of "c"; all of "d" fits.
    assert chunks == [{"a": 40}, {"b": 30}, {"c": 56, "d": 4}, {"c": 44}]


def test_a_scored_prompt_never_gets_more_than_max_scored_tokens() -> None:
    limits = Limits(
        8, 64, 2_000_000, GEOMETRY, chunk_multiple=8, max_scored=32, avoid_partial_prefill=True
    )
    scheduler = Scheduler(limits)
    scheduler.add(Sequence("a", [1] * 36, 0, prompt_logprobs=0))
    assert list(scheduler.plan((NO_CAPACITY,)).chunks.values()) == [32]


def test_recurrent_prompts_stop_at_checkpoints_and_leave_the_rest_of_a_step() -> None:
    loop = EngineLoop(Limits(8, 64, 2_000_000, KVGeometry(100, row_bytes=10), checkpoint=16))
    for name, prompt in (("a", 20), ("b", 16), ("c", 40)):
        loop.scheduler.add(make_sequence(name, prompt))
    chunks = [list(loop.step().chunks.values()) for _ in range(3)]
    assert chunks == [[16, 16, 16], [4, 16], [8]]


def test_choices_share_one_prefill_and_fork() -> None:
    loop = EngineLoop(make_limits())
    loop.scheduler.add(make_sequence("n", 40, n=3))
    plan = loop.step()
    assert list(plan.chunks.values()) == [40]
    choices = list(plan.joins)
    assert [s.index for s in choices] == [0, 1, 2]
    assert set(plan.joins.values()) == set(plan.chunks)
    choices[0].tokens.append(9)
    assert choices[1].tokens[-1] == 1, "choices do not share their lists"
    assert list(loop.step().decode) == choices


def test_an_aborted_sequence_leaves_with_the_next_plan() -> None:
    loop = EngineLoop(make_limits())
    sequences = [make_sequence(name, 4, outputs=50) for name in "abc"]
    for sequence in sequences:
        loop.scheduler.add(sequence)
    for _ in range(2):
        loop.step()
    loop.scheduler.finish(sequences[1])
    assert list(loop.step().decode) == [sequences[0], sequences[2]]
    waiting = make_sequence("w", 4)
    loop.scheduler.add(waiting)
    loop.scheduler.finish(waiting)
    assert not loop.step().chunks


def test_a_row_whose_last_token_is_in_flight_takes_no_step() -> None:
    loop = EngineLoop(make_limits())
    loop.scheduler.add(make_sequence("one", 4, outputs=1))
    assert len(loop.step().joins) == 1
    assert not loop.step().decode
    assert [len(s.tokens) for s in loop.finished] == [5]


def test_a_request_waiting_for_the_disk_is_bypassed_and_keeps_its_place() -> None:
    on_disk = {"slow"}
    scheduler = Scheduler(make_limits(rows=1), None, lambda s: s.request_id in on_disk)
    slow, fast, last = (make_sequence(name, 5) for name in ("slow", "fast", "last"))
    scheduler.add(slow)
    assert scheduler.idle
    for sequence in (fast, last):
        scheduler.add(sequence)
    assert not scheduler.idle
    plan = scheduler.plan([NO_CAPACITY])
    assert list(plan.cached) == [fast]
    scheduler.commit(plan)
    scheduler.check_integrity()
    for sequence in list(plan.joins):
        scheduler.finish(sequence)
    assert [s.request_id for s in scheduler.waiting] == ["slow", "last"]
    on_disk.clear()
    assert list(scheduler.plan([NO_CAPACITY]).cached) == [slow]


def test_a_request_is_found_by_its_id_in_any_state() -> None:
    loop = EngineLoop(make_limits(rows=3))
    loop.scheduler.add(
        make_sequence("many", 4, outputs=20, n=5)
    )  # more choices than rows: they wait one by one
    loop.scheduler.add(make_sequence("pair", 100, n=2))
    for _ in range(4):
        loop.step()
    queues = loop.scheduler.running, list(loop.scheduler.waiting)
    found = loop.scheduler.sequences_of("many")
    assert sorted(s.index for s in found) == [0, 1, 2, 3, 4]
    assert all(any(s in queue for s in found) for queue in queues)
    for sequence in found:
        loop.scheduler.finish(sequence)
    assert loop.scheduler.sequences_of("many") == loop.scheduler.sequences_of("nobody") == []
    loop.drain()
    assert [s.request_id for s in loop.finished] == ["pair", "pair"]


class _CountingSequence(Sequence):
    """Counts how often the rank or length of any sequence is read."""

    reads = 0

    @property
    def rank(self) -> tuple[float, int, int]:
        _CountingSequence.reads += 1
        return super().rank

    @property
    def num_tokens(self) -> int:
        _CountingSequence.reads += 1
        return super().num_tokens


@pytest.mark.slow
def test_a_decision_costs_the_same_however_long_the_queue() -> None:
    def reads(waiting: int) -> tuple[int, int, int]:
        prefix_lookups: list[Sequence] = []
        disk_lookups: list[Sequence] = []

        def look_up(sequence: Sequence) -> int:
            prefix_lookups.append(sequence)
            return 0

        def is_fetched(sequence: Sequence) -> bool:
            disk_lookups.append(sequence)
            return False

        scheduler = Scheduler(make_limits(rows=4), look_up, is_fetched)
        for number in range(waiting):
            scheduler.add(
                _CountingSequence(str(number), [number, *range(9)], 50, arrival=float(number))
            )
        scheduler.commit(scheduler.plan([NO_CAPACITY]))
        prefix_lookups.clear()
        disk_lookups.clear()
        _CountingSequence.reads = 0
        for _ in range(3):
            assert not scheduler.idle
            plan = scheduler.plan([Capacity(4, 64)])
            scheduler.commit(plan)
            for sequence in plan.decode:
                scheduler.read(sequence, [7])
        scheduler.finish(scheduler.running[0])
        for sequence in scheduler.sequences_of("300"):
            scheduler.finish(sequence)
        assert scheduler.waiting.choices == waiting - 5
        return _CountingSequence.reads, len(prefix_lookups), len(disk_lookups)

    few, many = reads(400), reads(20_000)
    assert few == many
    assert 0 < few[0] < 400
    assert many[1:] == (0, 0), "no lookups while all rows are taken"


def test_plans_do_not_look_up_a_request_without_memory() -> None:
    """It is looked up once when it is queued, because its turn depends on its cached part."""
    asked: list[str] = []

    def look_up(sequence: Sequence) -> int:
        asked.append(sequence.request_id)
        return 0

    scheduler = Scheduler(make_limits(kv=60_000), look_up)
    scheduler.add(Sequence("has it", [1] * 60, 5))
    plan = scheduler.plan([NO_CAPACITY])
    scheduler.commit(plan)
    scheduler.add(Sequence("waits", [2] * 200, 5))
    for _ in range(3):
        assert not scheduler.plan(plan.capacities).cached
    assert asked == ["has it", "has it", "waits"]


@pytest.mark.parametrize(
    ("cached", "salts", "together"),
    [(True, ("", ""), 1), (True, ("", "other"), 2), (False, ("", ""), 2)],
)
def test_a_prompt_waits_for_a_sibling_whose_prefix_it_can_use(
    cached: bool, salts: tuple[str, str], together: int
) -> None:
    """Without a prefix cache, or with another salt, no prompt waits."""
    scheduler = Scheduler(make_limits(tokens=200), (lambda sequence: 0) if cached else None)
    for name, salt in zip("ab", salts, strict=True):
        scheduler.add(Sequence(name, list(range(60)), 5, cache_salt=salt))
    assert len(scheduler.plan([NO_CAPACITY]).chunks) == together


def test_a_blocked_request_is_bypassed_until_it_is_ready() -> None:
    on_disk: set[str] = set()
    scheduler = Scheduler(
        make_limits(rows=1),
        None,
        lambda s: s.request_id in on_disk,
        lambda s: min(4, s.num_tokens - 1),
    )
    first, second = make_sequence("first", 5), make_sequence("second", 5)
    for sequence in (first, second):
        scheduler.add(sequence)
    on_disk.add("first")
    scheduler.waiting.block(first)
    scheduler.check_integrity()
    assert scheduler.plan([NO_CAPACITY]).cached == {second: 4}
    scheduler.finish(second)
    assert scheduler.idle
    on_disk.clear()
    plan = scheduler.plan([NO_CAPACITY])
    assert (plan.cached, plan.chunks) == ({first: 4}, {first: 1})
