"""A scheduler stepped as the engine does it, without a model."""

from __future__ import annotations

from support.scheduler.page_pools import PagePools

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

GEOMETRY = KVGeometry(100, {32: 50}, 0, {None: 50, 32: 25})


class EngineLoop:
    """Steps a scheduler as the engine does: a step's tokens are read after the next is planned.

    Attributes:
        in_flight: sequences whose tokens of the last step are not read yet.
        ends: sequences without an output whose prompt ended in the last step.
        first_step: the step in which each sequence began first.
    """

    def __init__(self, limits: Limits) -> None:
        self.scheduler = Scheduler(limits)
        self.capacities = (NO_CAPACITY,) * limits.bands
        self.pools = PagePools(limits) if limits.paged else None
        self.joined: dict[Sequence, Sequence] = {}
        self.in_flight: list[Sequence] = []
        self.ends: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.preemptions = 0
        self.first_step: dict[Sequence, int] = {}
        self.steps = 0

    def step(self) -> Plan:
        scheduler, limits = self.scheduler, self.scheduler.limits
        plan = scheduler.plan(self.capacities)
        assert len(plan.decode) + plan.prefill_tokens <= limits.max_step_tokens
        assert len(plan.decode) + sum(s.rows for s in plan.chunks) <= limits.max_rows
        if self.pools is None:
            self._check_columns(plan)
        else:
            self._check_pages(self.pools, plan)
        scheduler.commit(plan)
        self.capacities = plan.capacities
        self.joined = plan.joins
        self.steps += 1
        for sequence in plan.cached:
            self.first_step.setdefault(sequence, self.steps)
        self.preemptions += len(plan.preempted)
        scheduler.check_integrity()
        for sequence in self.in_flight:
            if not sequence.finished:
                scheduler.read(sequence, [7])
                if len(sequence.tokens) == sequence.max_total_tokens:
                    scheduler.finish(sequence)
                    self.finished.append(sequence)
        for sequence in self.ends:
            scheduler.finish(sequence)
            self.finished.append(sequence)
        self.in_flight, self.ends = [*plan.decode, *plan.joins], list(plan.ends)
        return plan

    def _check_columns(self, plan: Plan) -> None:
        scheduler, limits = self.scheduler, self.scheduler.limits
        prompts = [s for s in scheduler.prefilling if s not in plan.preempted] + list(plan.cached)
        prefill_bytes = sum(
            limits.prompt_bytes(s.num_tokens, plan.cached.get(s, 0)) for s in prompts
        )
        moved = limits.geometry.moved_bands(self.capacities, plan.capacities)
        assert moved + prefill_bytes <= limits.kv_bytes
        for s, band in plan.decode.items():
            assert plan.capacities[band].columns >= s.num_tokens

    def _check_pages(self, pools: PagePools, plan: Plan) -> None:
        prompts = [s for s in self.scheduler.prefilling if s not in plan.preempted]
        begins = {s: plan.cached.get(s, s.computed) for s in plan.chunks}
        spans = {s: (begins[s], begins[s] + tokens) for s, tokens in plan.chunks.items()}
        pools.launch(plan.decode, self.joined, dict(plan.cached), spans, [*prompts, *plan.cached])

    def drain(self) -> None:
        for _ in range(100_000):
            if self.scheduler.idle and not self.in_flight:
                return
            self.step()
        raise AssertionError("some requests never finish")


def make_limits(
    rows: int = 8, tokens: int = 64, kv: int = 2_000_000, paged: bool = False
) -> Limits:
    return Limits(rows, tokens, kv, GEOMETRY, paged=paged)


def make_sequence(
    name: str, prompt: int, outputs: int = 5, n: int = 1, priority: int = 0, arrival: float = 0.0
) -> Sequence:
    return Sequence(name, [1] * prompt, outputs, n=n, priority=priority, arrival=arrival)
