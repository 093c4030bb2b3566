"""The order of requests: classes, ageing, bypassing, and who is preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduler.loop import GEOMETRY, EngineLoop, make_limits, make_sequence

from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY
from chairlift.scheduler.step_prompts import MAX_PASSED


@pytest.mark.parametrize(
    ("later", "order"),
    [(2.0, ["old", "single", "pair"]), (2.1, ["old", "pair", "single"])],
    ids=["due within the bound", "due later"],
)
def test_a_request_waiting_for_several_rows_is_bypassed_within_a_bound(
    later: float, order: list[str]
) -> None:
    loop = EngineLoop(replace(make_limits(rows=4), bypass=2.0))
    loop.scheduler.add(make_sequence("old", 4, outputs=10, n=3))
    loop.step()
    loop.scheduler.add(make_sequence("pair", 4, n=2))
    loop.scheduler.add(make_sequence("single", 4, outputs=40, arrival=later))
    chunks = loop.step().chunks
    assert [s.request_id for s in chunks] == (["single"] if later == 2.0 else [])
    loop.drain()
    in_order = sorted(loop.first_step, key=loop.first_step.__getitem__)
    assert list(dict.fromkeys(s.request_id for s in in_order)) == order


@pytest.mark.slow
@pytest.mark.parametrize("bypass", [0.0, 2.0, 30.0])
def test_a_request_waiting_for_all_rows_is_not_starved_by_bypassing(bypass: float) -> None:
    """Single requests arrive all the time, faster than they are served."""
    loop = EngineLoop(replace(make_limits(rows=4), bypass=bypass))
    wide = make_sequence("wide", 4, n=4, arrival=1.0)
    for number in range(800):
        if number == 10:
            loop.scheduler.add(wide)
        loop.scheduler.add(
            make_sequence(str(number), 4, outputs=3 + number % 9, arrival=number / 10)
        )
        loop.step()
    assert len(loop.scheduler.waiting) > 100, "the load exceeds the capacity to the end"
    assert wide in loop.first_step, "the request starves"
    before = [s for s, step in loop.first_step.items() if step < loop.first_step[wide]]
    latest = max(s.due for s in before)
    assert latest <= 1.0 + bypass
    assert latest >= min(1.0, bypass), "some requests bypassed it"
    loop.drain()
    assert len(loop.finished) == 804


def test_a_step_looks_at_a_bounded_number_of_requests() -> None:
    """Behind many requests that need more rows than are free stands one that could begin."""
    loop = EngineLoop(make_limits(rows=4))
    loop.scheduler.add(make_sequence("old", 4, outputs=50, n=3))
    loop.step()
    for number in range(MAX_PASSED):
        loop.scheduler.add(make_sequence(f"wide {number}", 4, n=2))
    loop.scheduler.add(make_sequence("single", 4))
    assert not loop.step().chunks
    loop.scheduler.finish(loop.scheduler.sequences_of("wide 0")[0])
    assert [s.request_id for s in loop.step().chunks] == ["single"]


def test_the_youngest_is_preempted_and_resumes_with_its_tokens() -> None:
    loop = EngineLoop(make_limits(kv=60_000))
    for name in ("old", "middle", "young"):
        loop.scheduler.add(make_sequence(name, 60, outputs=170))
    loop.drain()
    assert loop.preemptions >= 1
    assert [s.request_id for s in loop.finished] == ["old", "middle", "young"]
    assert [len(s.tokens) for s in loop.finished] == [230, 230, 230]


def _order(loop: EngineLoop) -> list[str]:
    return [sequence.request_id for sequence in loop.finished]


def test_within_a_class_it_is_first_come_first_served() -> None:
    loop = EngineLoop(make_limits(rows=1))
    for name, arrival in (("c", 2.0), ("a", 0.0), ("d", 2.0), ("b", 1.0)):
        loop.scheduler.add(make_sequence(name, 4, arrival=arrival))
    loop.drain()
    assert _order(loop) == ["a", "b", "c", "d"], "equal arrivals keep the order of submission"


def test_urgent_requests_go_before_the_others() -> None:
    loop = EngineLoop(make_limits(rows=1))
    for name, priority in (("low", 5), ("normal", 0), ("urgent", -1), ("lowest", 100)):
        loop.scheduler.add(make_sequence(name, 4, priority=priority, arrival=1.0))
    loop.drain()
    assert _order(loop) == ["urgent", "normal", "low", "lowest"]


@pytest.mark.parametrize(("sooner", "order"), [(-1e-6, ["new", "old"]), (0.0, ["old", "new"])])
def test_an_old_request_goes_first_once_it_has_waited_for_the_difference(
    sooner: float, order: list[str]
) -> None:
    loop = EngineLoop(Limits(1, 64, 2_000_000, GEOMETRY, ageing=4.0))
    loop.scheduler.add(make_sequence("old", 4, priority=3, arrival=100.0))
    loop.scheduler.add(make_sequence("new", 4, priority=-2, arrival=100.0 + 5 * 4.0 + sooner))
    loop.drain()
    assert _order(loop) == order


@pytest.mark.slow
@pytest.mark.parametrize("kv", [90_000, 2_000_000])
def test_nobody_starves_under_a_constant_urgent_load(kv: int) -> None:
    """Urgent requests arrive faster than they are served, besides one of a low class."""
    loop = EngineLoop(Limits(4, 64, kv, GEOMETRY, ageing=2.0))
    low = make_sequence("low", 100, outputs=60, priority=3, arrival=0.5)
    overtaken_for, second = 6 * 2.0, 0
    while not low.finished:
        for number in range(5 if second == 0 else 2):
            name = f"{second}.{number}"
            loop.scheduler.add(make_sequence(name, 50, 250, priority=-3, arrival=float(second)))
        for _ in range(30):
            loop.step()
        if second == 0:
            loop.scheduler.add(low)
        second += 1
        assert second < 500, "the request starves"
    before = [s.arrival for s in loop.finished[: loop.finished.index(low)]]
    assert overtaken_for - 2 < max(before) < overtaken_for + 1, (
        "it was overtaken for just as long as ageing allows"
    )
    assert len(loop.scheduler.waiting) > 20, "the load exceeds the capacity to the end"
    assert (loop.preemptions > 0) == (kv < 2_000_000)


def test_an_urgent_prompt_shares_steps_with_a_long_one_of_a_lower_class() -> None:
    loop = EngineLoop(make_limits())
    loop.scheduler.add(make_sequence("long", 600, priority=1))
    loop.step()
    loop.scheduler.add(make_sequence("urgent", 40))
    plan = loop.step()
    assert [(s.request_id, n) for s, n in plan.chunks.items()] == [("urgent", 40), ("long", 24)]
    assert [s.request_id for s in plan.joins] == ["urgent"]


def test_the_youngest_of_the_lowest_class_is_preempted_first() -> None:
    """Rows and prompts alike, but never the request that is due first."""

    def limits(kv: int) -> Limits:
        return Limits(8, 256, kv, GEOMETRY, checkpoint=64)

    loop = EngineLoop(limits(2_000_000))
    prompts = {"first": 9, "row of 1": 9, "row of 0": 9, "prompt of 0": 400, "prompt of 1": 400}
    for number, (name, prompt) in enumerate(prompts.items()):
        priority = 0 if name.endswith("0") else 1
        arrival = {"first": -100.0, "row of 1": -50.0}.get(name, number / 10)
        loop.scheduler.add(make_sequence(name, prompt, 90, priority=priority, arrival=arrival))
        loop.step()
    assert [s.request_id for s in loop.scheduler.prefilling] == ["prompt of 0", "prompt of 1"]
    preempted = []
    for kv in (2_000_000, 320_000, 250_000, 150_000):
        loop.scheduler.limits = limits(kv)
        preempted.append([s.request_id for s in loop.scheduler.plan([NO_CAPACITY]).preempted])
    order = ["prompt of 1", "row of 1", "prompt of 0"]
    assert preempted == [order[: len(names)] for names in preempted]
    assert list(map(len, preempted)) == [0, 1, 2, 3]
