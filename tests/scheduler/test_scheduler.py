"""The scheduler's promises, simulated without a model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.capacity import Capacity, KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import MAX_PASSED, NO_CAPACITY, Plan, Scheduler
from chairlift.scheduler.sequence import Sequence

GEOMETRY = KVGeometry(100, {32: 50}, 0, {None: 50, 32: 25})


class Line:
    """Runs a scheduler as the engine does: a step's tokens are read after the next is planned."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler = Scheduler(limits)
        self.capacities = (NO_CAPACITY,) * limits.bands
        self.in_flight: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.preemptions = 0
        # The step in which each began first.
        self.began: dict[Sequence, int] = {}
        self.steps = 0

    def step(self) -> Plan:
        scheduler, limits = self.scheduler, self.scheduler.limits
        plan = scheduler.plan(self.capacities)
        assert len(plan.decode) + plan.prefill_tokens <= limits.max_step_tokens
        assert len(plan.decode) + sum(s.rows for s in plan.chunks) <= limits.max_rows
        prompts = [s for s in scheduler.prefilling if s not in plan.preempted] + list(plan.cached)
        held = sum(limits.prompt_bytes(s.num_tokens, plan.cached.get(s, 0)) for s in prompts)
        moved = limits.geometry.moved_bands(self.capacities, plan.capacities)
        assert moved + held <= limits.kv_bytes
        for s, band in plan.decode.items():
            assert plan.capacities[band].columns >= s.num_tokens
        scheduler.commit(plan)
        self.capacities = plan.capacities
        self.steps += 1
        for sequence in plan.cached:
            self.began.setdefault(sequence, self.steps)
        self.preemptions += len(plan.preempted)
        scheduler.check_integrity()
        for sequence in self.in_flight:
            if not sequence.finished:
                scheduler.token(sequence, 7)
                if len(sequence.tokens) == sequence.max_total_tokens:
                    scheduler.finish(sequence)
                    self.finished.append(sequence)
        self.in_flight = [*plan.decode, *plan.joins]
        return plan

    def drain(self) -> None:
        for _ in range(100_000):
            if self.scheduler.idle and not self.in_flight:
                return
            self.step()
        raise AssertionError("the line never empties")


def _limits(rows: int = 8, tokens: int = 64, kv: int = 2_000_000) -> Limits:
    return Limits(rows, tokens, kv, GEOMETRY)


def _sequence(
    name: str, prompt: int, most: int = 5, n: int = 1, priority: int = 0, arrival: float = 0.0
) -> Sequence:
    return Sequence(name, [1] * prompt, most, n=n, priority=priority, arrival=arrival)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), kv=st.sampled_from([60_000, 200_000, 2_000_000]))
def test_everyone_is_served_within_the_limits(seed: int, kv: int) -> None:
    random_ = random.Random(seed)
    line = Line(_limits(kv=kv))
    longest = line.scheduler.limits.max_context
    wanted = 0
    for number in range(40):
        prompt = random_.randrange(1, min(300, longest - 1))
        most = random_.randrange(1, min(150, longest - prompt + 1))
        n = random_.choice([1, 1, 1, 3, 11])
        wanted += n * most
        priority = random_.choice([0, 0, -2, 1, 100])
        line.scheduler.add(_sequence(str(number), prompt, most, n, priority, float(number)))
        for _ in range(random_.randrange(8)):
            line.step()
    line.drain()
    assert sum(len(s.tokens) - s.prompt_tokens for s in line.finished) == wanted
    assert len(set(map(id, line.finished))) == len(line.finished)


def test_a_long_prompt_never_takes_more_than_its_chunk_from_the_running() -> None:
    line = Line(_limits(tokens=24))
    line.scheduler.add(_sequence("running", 3, most=200))
    line.step()
    line.scheduler.add(_sequence("long", 400))
    plans = [line.step() for _ in range(17)]
    assert all(len(plan.decode) == 1 for plan in plans), "the running row misses no step"
    assert all(plan.prefill_tokens == 23 for plan in plans)
    assert not any(plan.joins for plan in plans)
    assert len(line.step().joins) == 1, "400 tokens, 23 a step"


def test_prompts_of_any_length_share_a_step() -> None:
    line = Line(_limits())
    for name, prompt in (("a", 5), ("b", 40), ("c", 14), ("d", 30)):
        line.scheduler.add(_sequence(name, prompt))
    plan = line.step()
    assert list(plan.chunks.values()) == [5, 40, 14, 5]
    assert [s.request_id for s in plan.joins] == ["a", "b", "c"]
    plan = line.step()
    assert [s.request_id for s in plan.decode] == ["a", "b", "c"]
    assert [(s.request_id, n) for s, n in plan.chunks.items()] == [("d", 25)]


def test_a_prompt_that_gets_the_rest_of_a_step_goes_on_before_the_next() -> None:
    line = Line(_limits())
    for name in "abc":
        line.scheduler.add(_sequence(name, 40))
    plans = [line.step() for _ in range(2)]
    assert [list(plan.chunks.values()) for plan in plans] == [[40, 24], [16, 40]]
    assert [s.request_id for s in plans[1].joins] == ["b", "c"]


def test_a_prompt_is_not_begun_with_less_than_a_step_of_its_own_could_hold() -> None:
    line = Line(Limits(8, 64, 2_000_000, GEOMETRY, chunk_multiple=8, avoid_partial_prefill=True))
    for name, prompt in (("a", 40), ("b", 30), ("c", 100), ("d", 4)):
        line.scheduler.add(_sequence(name, prompt))
    plans = [line.step() for _ in range(4)]
    chunks = [{s.request_id: n for s, n in plan.chunks.items()} for plan in plans]
    # "b" would fit beside "a" with 16 tokens, and "c" beside "b" with 40; "d" fits whole.
    assert chunks == [{"a": 40}, {"b": 30}, {"c": 56, "d": 4}, {"c": 44}]


def test_the_rest_of_a_scored_prompt_does_not_go_along_beyond_what_may_be_scored() -> None:
    limits = Limits(
        8, 64, 2_000_000, GEOMETRY, chunk_multiple=8, max_scored=32, avoid_partial_prefill=True
    )
    scheduler = Scheduler(limits)
    scheduler.add(Sequence("a", [1] * 36, 0, prompt_logprobs=0))
    assert list(scheduler.plan((NO_CAPACITY,)).chunks.values()) == [32]


def test_recurrent_prompts_stop_at_the_checkpoints_and_leave_the_rest_to_others() -> None:
    line = Line(Limits(8, 64, 2_000_000, KVGeometry(100, row_bytes=10), checkpoint=16))
    for name, prompt in (("a", 20), ("b", 16), ("c", 40)):
        line.scheduler.add(_sequence(name, prompt))
    chunks = [list(line.step().chunks.values()) for _ in range(3)]
    assert chunks == [[16, 16, 16], [4, 16], [8]]


@pytest.mark.parametrize(
    ("later", "order"),
    [(2.0, ["old", "single", "pair"]), (2.1, ["old", "pair", "single"])],
    ids=["due within the bound", "due later"],
)
def test_who_waits_for_several_rows_is_passed_within_a_bound(
    later: float, order: list[str]
) -> None:
    line = Line(replace(_limits(rows=4), bypass=2.0))
    line.scheduler.add(_sequence("old", 4, most=10, n=3))
    line.step()
    line.scheduler.add(_sequence("pair", 4, n=2))
    line.scheduler.add(_sequence("single", 4, most=40, arrival=later))
    chunks = line.step().chunks
    assert [s.request_id for s in chunks] == (["single"] if later == 2.0 else [])
    line.drain()
    begun = sorted(line.began, key=line.began.__getitem__)
    assert list(dict.fromkeys(s.request_id for s in begun)) == order


@pytest.mark.parametrize("bypass", [0.0, 2.0, 30.0])
def test_who_waits_for_all_rows_is_not_starved_by_those_that_pass(bypass: float) -> None:
    """Single requests come without end, faster than they are served."""
    line = Line(replace(_limits(rows=4), bypass=bypass))
    wide = _sequence("wide", 4, n=4, arrival=1.0)
    for number in range(800):
        if number == 10:
            line.scheduler.add(wide)
        line.scheduler.add(_sequence(str(number), 4, most=3 + number % 9, arrival=number / 10))
        line.step()
    assert len(line.scheduler.waiting) > 100, "they never ceased to be too many"
    assert wide in line.began, "it starves"
    before = [s for s, step in line.began.items() if step < line.began[wide]]
    latest = max(s.due for s in before)
    assert latest <= 1.0 + bypass
    assert latest >= min(1.0, bypass), "some passed it"
    line.drain()
    assert len(line.finished) == 804


def test_no_more_are_looked_at_than_a_step_can_afford() -> None:
    """Many that need more rows than are free, and behind them one that could begin."""
    line = Line(_limits(rows=4))
    line.scheduler.add(_sequence("old", 4, most=50, n=3))
    line.step()
    for number in range(MAX_PASSED):
        line.scheduler.add(_sequence(f"wide {number}", 4, n=2))
    line.scheduler.add(_sequence("single", 4))
    assert not line.step().chunks
    line.scheduler.finish(line.scheduler.sequences_of("wide 0")[0])
    assert [s.request_id for s in line.step().chunks] == ["single"]


def test_choices_share_one_prefill_and_fork() -> None:
    line = Line(_limits())
    line.scheduler.add(_sequence("n", 40, n=3))
    plan = line.step()
    assert list(plan.chunks.values()) == [40]
    choices = list(plan.joins)
    assert [s.index for s in choices] == [0, 1, 2]
    assert set(plan.joins.values()) == set(plan.chunks)
    choices[0].tokens.append(9)
    assert choices[1].tokens[-1] == 1, "choices do not share their lists"
    assert list(line.step().decode) == choices


def test_the_youngest_gives_way_and_comes_back_with_its_tokens() -> None:
    line = Line(_limits(kv=60_000))
    for name in ("old", "middle", "young"):
        line.scheduler.add(_sequence(name, 60, most=170))
    line.drain()
    assert line.preemptions >= 1
    assert [s.request_id for s in line.finished] == ["old", "middle", "young"]
    assert [len(s.tokens) for s in line.finished] == [230, 230, 230]


def _order(line: Line) -> list[str]:
    return [sequence.request_id for sequence in line.finished]


def test_within_a_class_it_is_first_come_first_served() -> None:
    line = Line(_limits(rows=1))
    for name, arrival in (("c", 2.0), ("a", 0.0), ("d", 2.0), ("b", 1.0)):
        line.scheduler.add(_sequence(name, 4, arrival=arrival))
    line.drain()
    assert _order(line) == ["a", "b", "c", "d"], "who came at once keeps the order of the queue"


def test_urgent_requests_go_before_the_others() -> None:
    line = Line(_limits(rows=1))
    for name, priority in (("low", 5), ("normal", 0), ("urgent", -1), ("lowest", 100)):
        line.scheduler.add(_sequence(name, 4, priority=priority, arrival=1.0))
    line.drain()
    assert _order(line) == ["urgent", "normal", "low", "lowest"]


@pytest.mark.parametrize(("sooner", "order"), [(-1e-6, ["new", "old"]), (0.0, ["old", "new"])])
def test_an_old_request_goes_first_once_it_has_waited_for_the_difference(
    sooner: float, order: list[str]
) -> None:
    line = Line(Limits(1, 64, 2_000_000, GEOMETRY, ageing=4.0))
    line.scheduler.add(_sequence("old", 4, priority=3, arrival=100.0))
    line.scheduler.add(_sequence("new", 4, priority=-2, arrival=100.0 + 5 * 4.0 + sooner))
    line.drain()
    assert _order(line) == order


@pytest.mark.parametrize("kv", [90_000, 2_000_000])
def test_nobody_starves_under_a_constant_urgent_load(kv: int) -> None:
    """More urgent requests than can be served, without end, and one of a low class."""
    line = Line(Limits(4, 64, kv, GEOMETRY, ageing=2.0))
    low = _sequence("low", 100, most=60, priority=3, arrival=0.5)
    overtaken_for, second = 6 * 2.0, 0
    while not low.finished:
        for number in range(5 if second == 0 else 2):
            name = f"{second}.{number}"
            line.scheduler.add(_sequence(name, 50, 250, priority=-3, arrival=float(second)))
        for _ in range(30):
            line.step()
        if second == 0:
            line.scheduler.add(low)
        second += 1
        assert second < 500, "it starves"
    before = [s.arrival for s in line.finished[: line.finished.index(low)]]
    assert overtaken_for - 2 < max(before) < overtaken_for + 1, "it gave way as long as it had to"
    assert len(line.scheduler.waiting) > 20, "they never ceased to come"
    assert (line.preemptions > 0) == (kv < 2_000_000)


def test_an_urgent_prompt_shares_steps_with_a_long_one_of_a_lower_class() -> None:
    line = Line(_limits())
    line.scheduler.add(_sequence("long", 600, priority=1))
    line.step()
    line.scheduler.add(_sequence("urgent", 40))
    plan = line.step()
    assert [(s.request_id, n) for s, n in plan.chunks.items()] == [("urgent", 40), ("long", 24)]
    assert [s.request_id for s in plan.joins] == ["urgent"]


def test_the_youngest_of_the_lowest_class_gives_way_first() -> None:
    """Rows and prompts alike, but never the one that is due before all others."""

    def limits(kv: int) -> Limits:
        return Limits(8, 256, kv, GEOMETRY, checkpoint=64)

    line = Line(limits(2_000_000))
    prompts = {"first": 9, "row of 1": 9, "row of 0": 9, "prompt of 0": 400, "prompt of 1": 400}
    for number, (name, prompt) in enumerate(prompts.items()):
        priority = 0 if name.endswith("0") else 1
        arrival = {"first": -100.0, "row of 1": -50.0}.get(name, number / 10)
        line.scheduler.add(_sequence(name, prompt, 90, priority=priority, arrival=arrival))
        line.step()
    assert [s.request_id for s in line.scheduler.prefilling] == ["prompt of 0", "prompt of 1"]
    gone = []
    for kv in (2_000_000, 320_000, 250_000, 150_000):
        line.scheduler.limits = limits(kv)
        gone.append([s.request_id for s in line.scheduler.plan([NO_CAPACITY]).preempted])
    order = ["prompt of 1", "row of 1", "prompt of 0"]
    assert gone == [order[: len(names)] for names in gone]
    assert list(map(len, gone)) == [0, 1, 2, 3]


def test_an_aborted_sequence_leaves_with_the_next_plan() -> None:
    line = Line(_limits())
    sequences = [_sequence(name, 4, most=50) for name in "abc"]
    for sequence in sequences:
        line.scheduler.add(sequence)
    for _ in range(2):
        line.step()
    line.scheduler.finish(sequences[1])
    assert list(line.step().decode) == [sequences[0], sequences[2]]
    waiting = _sequence("w", 4)
    line.scheduler.add(waiting)
    line.scheduler.finish(waiting)
    assert not line.step().chunks


def test_a_row_that_only_waits_for_its_last_token_takes_no_step() -> None:
    line = Line(_limits())
    line.scheduler.add(_sequence("one", 4, most=1))
    assert len(line.step().joins) == 1
    assert not line.step().decode
    assert [len(s.tokens) for s in line.finished] == [5]


def test_who_waits_for_the_disk_is_passed_and_keeps_its_place() -> None:
    on_disk = {"slow"}
    scheduler = Scheduler(_limits(rows=1), None, lambda s: s.request_id in on_disk)
    slow, fast, last = (_sequence(name, 5) for name in ("slow", "fast", "last"))
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


def test_a_request_is_found_by_its_id_wherever_it_stands() -> None:
    line = Line(_limits(rows=3))
    line.scheduler.add(_sequence("many", 4, most=20, n=5))  # more than rows: queued one by one
    line.scheduler.add(_sequence("pair", 100, n=2))
    for _ in range(4):
        line.step()
    places = line.scheduler.running, list(line.scheduler.waiting)
    found = line.scheduler.sequences_of("many")
    assert sorted(s.index for s in found) == [0, 1, 2, 3, 4]
    assert all(any(s in place for s in found) for place in places)
    for sequence in found:
        line.scheduler.finish(sequence)
    assert line.scheduler.sequences_of("many") == line.scheduler.sequences_of("nobody") == []
    line.drain()
    assert [s.request_id for s in line.finished] == ["pair", "pair"]


class _Watched(Sequence):
    """Counts how often anybody's place or length is asked for."""

    looks = 0

    @property
    def rank(self) -> tuple[float, int, int]:
        _Watched.looks += 1
        return super().rank

    @property
    def num_tokens(self) -> int:
        _Watched.looks += 1
        return super().num_tokens


def test_a_decision_costs_the_same_however_long_the_queue() -> None:
    def looks(waiting: int) -> tuple[int, int, int]:
        cached: list[Sequence] = []
        fetching: list[Sequence] = []

        def look_up(sequence: Sequence) -> int:
            cached.append(sequence)
            return 0

        def on_its_way(sequence: Sequence) -> bool:
            fetching.append(sequence)
            return False

        scheduler = Scheduler(_limits(rows=4), look_up, on_its_way)
        for number in range(waiting):
            scheduler.add(_Watched(str(number), [number, *range(9)], 50, arrival=float(number)))
        scheduler.commit(scheduler.plan([NO_CAPACITY]))
        cached.clear()
        fetching.clear()
        _Watched.looks = 0
        for _ in range(3):
            assert not scheduler.idle
            plan = scheduler.plan([Capacity(4, 64)])
            scheduler.commit(plan)
            for sequence in plan.decode:
                scheduler.token(sequence, 7)
        scheduler.finish(scheduler.running[0])
        for sequence in scheduler.sequences_of("300"):
            scheduler.finish(sequence)
        assert scheduler.waiting.choices == waiting - 5
        return _Watched.looks, len(cached), len(fetching)

    few, many = looks(400), looks(20_000)
    assert few == many
    assert 0 < few[0] < 400
    assert many[1:] == (0, 0), "while all rows are taken nobody is looked up"


def test_who_finds_no_memory_is_not_looked_up() -> None:
    asked: list[str] = []

    def look_up(sequence: Sequence) -> int:
        asked.append(sequence.request_id)
        return 0

    scheduler = Scheduler(_limits(kv=60_000), look_up)
    scheduler.add(Sequence("has it", [1] * 60, 5))
    plan = scheduler.plan([NO_CAPACITY])
    scheduler.commit(plan)
    scheduler.add(Sequence("waits", [2] * 200, 5))
    assert not scheduler.plan(plan.capacities).cached
    assert asked == ["has it"]


@pytest.mark.parametrize(
    ("rows", "tokens", "kv", "named"),
    [(0, 64, 10**6, "max-rows"), (8, 8, 10**6, "max-step-tokens"), (8, 64, 9_000, "kv-memory")],
)
def test_limits_that_cannot_work_are_refused(rows: int, tokens: int, kv: int, named: str) -> None:
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
def test_what_fits_alone_is_known_to_the_token(geometry: KVGeometry) -> None:
    limits = Limits(4, 24, 60_000, geometry)
    longest = limits.max_context
    assert limits.bytes_alone(longest) <= limits.kv_bytes < limits.bytes_alone(longest + 1)
    for most in (1, 3, longest - 1):
        line = Line(limits)
        line.scheduler.add(_sequence("alone", longest - most, most))
        line.drain()
        assert (len(line.finished), line.preemptions) == (1, 0)
    scheduler = Scheduler(limits)
    scheduler.add(_sequence("too long", longest, most=1))
    assert not scheduler.plan([NO_CAPACITY]).chunks, "it could only wait for ever"


def test_two_that_fit_alone_only_are_both_served() -> None:
    """Who gives way is computed anew, of whatever length it was."""
    line = Line(_limits(kv=60_000))
    longest = line.scheduler.limits.max_context
    for name in "ab":
        line.scheduler.add(_sequence(name, 9, longest - 9))
    line.drain()
    assert line.preemptions > 0
    assert [len(s.tokens) for s in line.finished] == [longest, longest]


def test_a_shortage_is_told_in_numbers() -> None:
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


@pytest.mark.parametrize(
    ("cached", "salts", "together"),
    [(True, ("", ""), 1), (True, ("", "other"), 2), (False, ("", ""), 2)],
)
def test_a_prompt_waits_for_one_that_it_can_take_over_from(
    cached: bool, salts: tuple[str, str], together: int
) -> None:
    """Nobody waits where there is no prefix cache, or for a tenant who shares nothing."""
    scheduler = Scheduler(_limits(tokens=200), (lambda sequence: 0) if cached else None)
    for name, salt in zip("ab", salts, strict=True):
        scheduler.add(Sequence(name, list(range(60)), 5, cache_salt=salt))
    assert len(scheduler.plan([NO_CAPACITY]).chunks) == together


def test_who_is_set_aside_is_passed_until_it_is_back() -> None:
    on_disk: set[str] = set()
    scheduler = Scheduler(
        _limits(rows=1), None, lambda s: s.request_id in on_disk, lambda s: min(4, s.num_tokens - 1)
    )
    first, second = _sequence("first", 5), _sequence("second", 5)
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
