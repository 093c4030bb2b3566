"""Bands: short rows are not padded to long ones, and tokens and limits stay the same."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.bench import Bench
from support.engine.reference import solo_tokens
from support.engine.swap import KINDS, assert_same, squeeze
from support.tiny import TinyKind, tiny_model

from chairlift.cache.capacity import Capacity, KVGeometry, resize_order
from chairlift.engine.model import attention
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.simulate.machine import StepCost, factors
from chairlift.scheduler.simulate.report import figures
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceRequest
from chairlift.scheduler.simulate.traffic import Lengths, Traffic
from chairlift.scheduler.step_memory.bands import ONE_BAND, Band, Bands, numbers_of, recut
from chairlift.scheduler.step_memory.capacity_planner import MAX_MOVES

ANY = sys.maxsize
BYTES = 100
LIMITS = Limits(64, 256, 100_000_000, KVGeometry(BYTES), bands=4, band_bytes=50_000)


def _recut(
    bands: Bands, lengths: list[int], limits: Limits = LIMITS, cached: list[int] | None = None
) -> Bands:
    cached = lengths if cached is None else cached
    taken = set(numbers_of(bands, cached))
    return recut(bands, lengths, cached, [n for n in range(limits.bands) if n not in taken], limits)


def test_a_band_is_opened_if_it_saves_enough_and_few_rows_move() -> None:
    short, long = [100] * 12, [1100]
    # Padding twelve rows to the long one costs 1,200,000 bytes.
    assert _recut(ONE_BAND, short + long) == (Band(0, 128), Band(1, ANY))
    assert _recut(ONE_BAND, short + long, cached=long) == (Band(1, 128), Band(0, ANY))
    assert _recut(ONE_BAND, short + long, replace(LIMITS, band_bytes=1_200_001)) == ONE_BAND
    assert _recut(ONE_BAND, short + long, replace(LIMITS, bands=1)) == ONE_BAND
    windows = replace(LIMITS, geometry=KVGeometry(0, {64: BYTES}))
    assert _recut(ONE_BAND, short + long, windows) == ONE_BAND, "windows cost the same in any band"


def test_a_band_is_closed_once_it_saves_much_less() -> None:
    two = (Band(0, 128), Band(1, ANY))
    for rows, kept in ((6, True), (1, True), (0, False)):
        assert (_recut(two, [100] * rows + [1100]) == two) == kept
    assert _recut(two, [100] * 6) == (Band(0, ANY),), "no row is long any more"
    # One row of 100 and one of 400: saving 30,000 bytes keeps a band, but does not open one.
    assert _recut(ONE_BAND, [100, 400]) == ONE_BAND
    assert _recut(two, [100, 400]) == two
    assert _recut(two, [100, 300]) == (Band(1, ANY),), "the row with more to move stays"


def test_when_all_bands_are_used_the_least_useful_is_closed() -> None:
    limits = replace(LIMITS, bands=3)
    three = (Band(0, 128), Band(1, 512), Band(2, ANY))
    lengths = [100] * 6 + [500] * 9 + [1000] * 3
    assert _recut(three, lengths, limits) == three
    cached, lengths = lengths, [*lengths, 8000]
    fewer = _recut(three, lengths, limits)
    assert fewer == (Band(1, 512), Band(2, ANY))
    after = _recut(fewer, lengths, limits, cached)
    assert after == (Band(1, 512), Band(2, 1024), Band(0, ANY))
    assert _recut(after, lengths, limits, cached) == after


def test_buffers_that_shrink_are_resized_first() -> None:
    geometry = KVGeometry(BYTES, {}, 0, {None: 50})
    now = [Capacity(1, 64), Capacity(10, 1000), Capacity(4, 64)]
    then = [Capacity(1, 9000), NO_CAPACITY, Capacity(4, 64)]
    assert resize_order(now, then) == [1, 2, 0]
    kept = 4 * 64 * BYTES
    assert geometry.moved_bands(now, then) == kept + 9000 * BYTES + 9000 * 50
    assert geometry.moved_bands(now, now) == sum(map(geometry.reserved, now)) + 10 * 1000 * 50
    assert geometry.moved_bands(now[:1], then[:1]) == geometry.moved(now[0], then[0])


class WatchedSimulation(Simulation):
    """Counts the rows that change bands (``moves``) and the bands in use (``used``)."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        cost = StepCost(step=5e-3, row=5e-4, context=1e-7, token=1e-4, pair=1e-8)
        super().__init__(limits, cost, factors(0.3, seed))
        self.moves: Counter[Sequence] = Counter()
        self.used: Counter[int] = Counter()
        self._places: dict[Sequence, int] = {}

    def serve(self, requests: list[TraceRequest]) -> float:
        """Serves all requests; returns the padding ratio."""
        commit = self.scheduler.commit

        def watched(plan: Plan) -> None:
            old = self._places
            changed = [s for s, band in plan.decode.items() if old.get(s, band) != band]
            assert len(changed) <= MAX_MOVES
            self.moves.update(changed)
            self.used[sum(capacity.rows > 0 for capacity in plan.capacities)] += 1
            self._places = plan.decode
            commit(plan)
            self.scheduler.check_integrity()

        self.scheduler.commit = watched  # type: ignore[method-assign]
        assert sum(self.run(requests)) == len(requests)
        assert len(self.measurements.served) + self.measurements.refused == len(requests)
        padding: float = figures(self.measurements, self.budget)["padding_ratio"]
        return padding


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kv=st.sampled_from([400_000, 1_500_000, 20_000_000]),
    bands=st.sampled_from([2, 4]),
    lookahead=st.sampled_from([0, 512]),
)
def test_random_traffic_breaks_no_limit(seed: int, kv: int, bands: int, lookahead: int) -> None:
    geometry = KVGeometry(BYTES, {32: 50}, 0, {None: 50, 32: 25})
    limits = Limits(
        16, 128, kv, geometry, lookahead_columns=lookahead, bands=bands, band_bytes=5_000
    )
    lengths = Lengths(80, 1.3, 1500), Lengths(60, 1.2, 900)
    traffic = Traffic(40, 40.0, prompts=lengths[0], outputs=lengths[1], seed=seed)
    simulation = WatchedSimulation(limits, seed)
    simulation.serve(list(traffic.draw()))
    assert simulation.budget.kv_bytes <= kv
    assert max(simulation.moves.values(), default=0) <= 20, "rows do not oscillate between bands"


@pytest.mark.slow
def test_long_rows_do_not_make_short_ones_wide() -> None:
    random_ = random.Random(3)
    requests = []
    for number in range(300):
        prompt = 4000 if number % 20 == 7 else random_.randrange(20, 100)
        requests.append(TraceRequest(number / 8, prompt, 60, 60))
    limits = replace(LIMITS, max_step_tokens=1000)
    banded, together = WatchedSimulation(limits), WatchedSimulation(replace(limits, bands=1))
    assert banded.serve(requests) < 0.5
    assert together.serve(requests) > 0.85
    assert banded.used[2] > 500, "short and long rows ran at once"
    assert sum(banded.moves.values()) < 60, "rows join the right band at once"
    assert banded.budget.kv_bytes < together.budget.kv_bytes / 2


class BandBench(Bench):
    """Counts the bands in use (``max_bands``) and the rows that change bands (``moves``)."""

    def __init__(self, model: Any, **options: Any) -> None:
        attention.install(model)
        super().__init__(model, **options)
        self.max_bands = self.moves = 0

    def step(self) -> None:
        before = self._places()
        super().step()
        after = self._places()
        self.moves += sum(before.get(s, band) != band for s, band in after.items())
        self.max_bands = max(self.max_bands, len(set(after.values())))
        batch, stats = self.core.batch, self.stats[-1]
        assert stats.kv_used_bytes <= stats.kv_reserved_bytes <= stats.kv_limit_bytes
        if batch.cached_rows:
            assert batch.nbytes <= self.core.limits.geometry.moved_bands(
                batch.capacities, batch.capacities
            )

    def _places(self) -> dict[Sequence, int]:
        batch = self.core.batch
        numbers = [n for n, band in enumerate(batch.bands) for _ in range(len(band))]
        return dict(zip(batch.rows, numbers, strict=False))


def _tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(3, 250) for _ in range(count)]


# Lengths of prompts and outputs: short rows, long rows, and rows that grow from short to long.
REQUESTS = [(2, 4), (75, 5), (10, 14), (5, 9), (3, 4), (35, 9), (13, 24), (1, 7)]
PROMPTS = [_tokens(number, length) for number, (length, _) in enumerate(REQUESTS)]


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_equal_the_solo_tokens_in_any_band(kind: TinyKind, squeezed: bool) -> None:
    """Rows join, outgrow their band and leave; some are preempted."""
    model = tiny_model(kind, seed=6)
    kv = 180_000 if squeezed else 1 << 30
    bench = BandBench(model, tokens=24, kv=kv, swap=1 << 26, bands=3)
    assert bench.core.limits.bands == 3
    for number, (prompt, (_, count)) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        bench.submit(str(number), prompt, count)
        for _ in range(number % 3):
            bench.step()
    bench.submit("choices", PROMPTS[2], 12, n=2)
    for _ in range(9):
        bench.step()
    for sequences in (4, 3, 2) if squeezed else ():
        squeeze(bench, sequences)
    bench.drain()
    for number, (prompt, (_, count)) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        tokens = bench.tokens(str(number))
        assert tokens == solo_tokens(model, prompt, count, tokens)
    third = bench.tokens("2")[:12]
    assert [bench.tokens("choices", index) for index in range(2)] == [third] * 2
    assert bench.max_bands > 1
    assert bench.moves > 0
    assert (sum(stats.preemptions for stats in bench.stats) > 0) == squeezed
    assert bench.core.batch.nbytes == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_quantized_rows_change_bands_without_loss() -> None:
    """For chunked layers, and windows as long as a chunk."""
    kind = KINDS["quantized"]
    model = kind.make()
    benches = []
    for bands in (1, 3):
        bench = BandBench(model, quantization=kind.quantization, bands=bands)
        assert bench.core.limits.bands == bands
        for number in range(24):
            length, count = [(3, 20), (28, 4), (4, 4), (9, 12)][number % 4]
            prompt = [token % 128 for token in _tokens(number, length)]
            bench.submit(str(number), prompt, count, logprobs=2)
        bench.drain()
        benches.append(bench)
    assert_same(benches[1], benches[0])
    assert benches[0].max_bands == 1 < benches[1].max_bands
    assert benches[1].moves > 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_a_long_row_does_not_resize_the_buffers_of_short_ones() -> None:
    model = tiny_model("llama")
    bench = BandBench(model, tokens=512, bands=4)
    for number in range(6):
        bench.submit(str(number), _tokens(number, 5 + number), 10)
    for _ in range(4):
        bench.step()
    [before] = [band for band in bench.core.batch.bands if len(band)]
    buffers, nbytes = before.capacity, before.nbytes
    bench.submit("long", _tokens(9, 1000), 5)
    for _ in range(6):
        bench.step()
    after = [band for band in bench.core.batch.bands if len(band)]
    [other] = [band for band in after if band is not before]
    assert (len(before), len(other)) == (6, 1)
    assert other.capacity.columns >= 1000
    assert before.capacity == buffers
    assert other.capacity.rows == 1
    assert before.nbytes == nbytes < other.nbytes
    stats = bench.stats[-1]
    assert stats.total_columns == 6 * before.capacity.columns + other.capacity.columns
    assert 0 < stats.padded_columns < 0.4 * stats.total_columns


def test_models_with_states_have_one_band() -> None:
    model = tiny_model("lfm2", seed=2)
    bench = BandBench(model, bands=4)
    assert bench.core.limits.bands == 1
    for number, length in enumerate((4, 200)):
        bench.submit(str(number), _tokens(number, length), 20)
    bench.drain()
    for number, length in enumerate((4, 200)):
        tokens = bench.tokens(str(number))
        assert tokens == solo_tokens(model, _tokens(number, length), 20, tokens)
    assert bench.max_bands == 1
