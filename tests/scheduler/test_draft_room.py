"""Prompts advance beside rows whose drafts are good enough to fill every step."""

from __future__ import annotations

import pytest
from support.scheduler.loop import EngineLoop, make_limits, make_sequence

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.chunks import MIN_CHUNK
from chairlift.scheduler.drafts import Draft
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

DRAFT_TOKENS = 16


class _Run:
    """Rows whose drafts are always right, in steps that take hardly longer with more tokens."""

    def __init__(self, rows: int, max_rows: int) -> None:
        limits = Limits(
            *(max_rows, max_rows + 64, 10**9, KVGeometry(100)), draft_tokens=DRAFT_TOKENS
        )
        self.scheduler = Scheduler(limits)
        self._plan = Plan(capacities=(NO_CAPACITY,))
        for number in range(rows):
            self.scheduler.add(Sequence(str(number), [1], 10**5))
        while self.room_left:
            self.step()

    @property
    def room_left(self) -> int:
        work = self._plan.work
        return self.scheduler.limits.max_step_tokens - work.rows - work.drafts

    def step(self) -> Plan:
        scheduler, last = self.scheduler, self._plan
        for sequence in (*last.decode, *last.joins):
            scheduler.read(sequence, [7] * (1 + len(last.drafts.get(sequence, ()))))
        proposed = Draft([7] * DRAFT_TOKENS, [0.99] * DRAFT_TOKENS)
        drafts = scheduler.choose_drafts(dict.fromkeys(scheduler.running, proposed))
        self._plan = plan = scheduler.plan(last.capacities, drafts)
        scheduler.commit(plan)
        work = plan.work
        scheduler.learn(work, 5e-3 + 1e-6 * (work.rows + work.drafts + work.tokens))
        return plan


def test_a_prompt_beside_rows_with_good_drafts_gets_tokens_in_every_step() -> None:
    run = _Run(rows=8, max_rows=16)
    prompt = Sequence("prompt", [1] * 5 * MIN_CHUNK, 5)
    run.scheduler.add(prompt)
    run.step()  # the drafts were chosen before the queue had it
    chunks = [run.step().chunks[prompt] for _ in range(5)]
    assert chunks == [MIN_CHUNK] * 5


def test_drafts_get_the_room_of_a_prompt_that_has_no_free_row() -> None:
    run = _Run(rows=8, max_rows=8)
    run.scheduler.add(Sequence("prompt", [1] * 200, 5))
    run.step()
    run.step()
    assert run.room_left == 0


def test_drafts_leave_the_tokens_that_the_longest_step_of_a_prompt_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = EngineLoop(make_limits())
    scheduler, most = loop.scheduler, loop.scheduler.limits.max_step_tokens
    rooms: list[int] = []

    def choose(drafts: object, rows: list[Sequence], room: int) -> dict[Sequence, list[int]]:
        rooms.append(room)
        return {}

    monkeypatch.setattr(scheduler._drafts, "choose", choose)
    scheduler.add(make_sequence("row", 4, 50))
    while not scheduler.running:
        loop.step()
    scheduler.choose_drafts({})
    for size, cut in ((5, True), (most, True), (40, False), (most, False)):
        sequence = make_sequence("prompt", size, 5)
        sequence.uncut = () if cut else (range(size),)
        scheduler.add(sequence)
        scheduler.waiting.unblock_ready()
        scheduler.choose_drafts({})
        scheduler.finish(sequence)
    assert rooms == [most - 1 - kept for kept in (0, 5, MIN_CHUNK, 40, most - 1)]
