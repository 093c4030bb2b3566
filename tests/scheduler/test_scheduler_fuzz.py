"""Some seeds of the scheduler's fuzz; SCHEDULER_FUZZ_SEEDS=10000 runs that many."""

from __future__ import annotations

import os

import pytest
from support.scheduler.fuzz import Fuzz
from support.scheduler.fuzz_counts import Counts

from chairlift.cache.capacity import Capacity, KVGeometry
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence, first_to_yield
from chairlift.scheduler.simulate.machine import StepCost
from chairlift.scheduler.simulate.report import figures
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceRequest

SEEDS = int(os.environ.get("SCHEDULER_FUZZ_SEEDS", "40"))
COST = StepCost(step=5e-3, row=5e-4, context=1e-7, token=1e-4, pair=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True], ids=["columns", "pages"])
def test_random_requests_break_no_limit_and_are_all_served(paged: bool) -> None:
    counts = Counts()
    for seed in range(SEEDS):
        try:
            Fuzz(seed, counts, paged).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    print(counts)
    # The seeds have to reach every case.
    assert counts.finished > 5 * SEEDS
    assert min(counts.preempted, counts.hits, counts.followers, counts.passed) > 0
    assert min(counts.resumed, counts.aborted) > 0
    assert min([counts.shared] if paged else [counts.bands, counts.padded, counts.accepted]) > 0


def _preemptions(prompt: int, output: int, limits: Limits) -> float:
    simulation = Simulation(limits, COST)
    list(simulation.run([TraceRequest(i * 0.01, prompt, output, output) for i in range(10)]))
    preemptions: float = figures(simulation.measurements, simulation.budget)["preemptions"]
    return preemptions


@pytest.mark.slow
@pytest.mark.parametrize("bands", [1, 4])
@pytest.mark.parametrize("lookahead", [0, 512])
@pytest.mark.parametrize("factor", [1.1, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("length", [128, 512])
def test_prompts_of_a_multiple_are_preempted_no_more_than_their_neighbours(
    length: int, factor: float, lookahead: int, bands: int
) -> None:
    """In small memory and large; outputs are so short that no request is preempted."""
    geometry = KVGeometry(300, {}, 0, {None: 10})
    base = Limits(8, 608, 1 << 60, geometry)
    kv = int(base.bytes_alone(length + 128) * factor)
    for multiple in (1, 128):
        limits = Limits(
            *(8, 608, kv, geometry),
            chunk_multiple=multiple,
            avoid_partial_prefill=True,
            lookahead_columns=lookahead,
            bands=bands,
            band_bytes=5_000,
        )
        preemptions = {n: _preemptions(n, 12, limits) for n in range(length - 1, length + 2)}
        assert set(preemptions.values()) == {0}, (multiple, preemptions)


def test_a_row_that_does_not_fit_beside_leaving_rows_is_preempted_and_begins_again() -> None:
    """No other request could be preempted."""
    geometry = KVGeometry(100, {}, 40_000, {None: 50})
    limits = Limits(8, 64, 200_000, geometry)
    scheduler = Scheduler(limits)
    sequence = Sequence("one", [1] * 200, 300)
    scheduler.add(sequence)
    capacities = (Capacity(0, 0),)
    for _ in range(5):
        plan = scheduler.plan(capacities)
        scheduler.commit(plan)
        capacities = plan.capacities
        for joined in plan.joins:
            scheduler.read(joined, [7])
    assert scheduler.running == [sequence]
    # Rows that are about to leave keep their states until the buffers have moved.
    plan = scheduler.plan((Capacity(4, 256),))
    assert (plan.preempted, plan.capacities) == ([sequence], (Capacity(0, 0),))
    scheduler.commit(plan)
    scheduler.check_integrity()
    plan = scheduler.plan(plan.capacities)
    assert list(plan.cached) == [sequence]
    assert first_to_yield([sequence]) is sequence
