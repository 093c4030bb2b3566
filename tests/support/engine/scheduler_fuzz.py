"""A scheduler against a model of the engine's memory: random limits, requests and mishaps.

``python tests/support/engine/scheduler_fuzz.py FIRST COUNT`` runs seeds and prints failures.
"""

from __future__ import annotations

import math
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace

from chairlift.cache.capacity import Capacity, KVGeometry, padded
from chairlift.cache.token_ids import common
from chairlift.scheduler.limits import Limits, PromptSize
from chairlift.scheduler.scheduler import NO_CAPACITY, Plan, Scheduler
from chairlift.scheduler.sequence import Sequence

# Steps that a seed may take until everybody is served: a hundred times what most take.
PATIENCE = 20_000
GEOMETRIES = (
    KVGeometry(100, {}, 0, {None: 50}),
    KVGeometry(300, {}, 0, {None: 10}),
    KVGeometry(60, {32: 50}, 0, {None: 6, 32: 25}),
    KVGeometry(20, {16: 90, 100: 30}, 0, {None: 2, 16: 9, 100: 3}),
    KVGeometry(0, {48: 80}, 0, {48: 40}),
)
RECURRENT = (
    KVGeometry(100, {}, 3000, {None: 50}),
    KVGeometry(0, {}, 2000),
    KVGeometry(40, {32: 40}, 500, {None: 20, 32: 20}),
)


@dataclass
class Cache:
    """A prompt's own cache: what was reserved, and how many tokens are in it. ``regular``: all
    chunks so far had a multiple of ``Limits.chunk_multiple`` tokens.
    """

    size: PromptSize
    nbytes: int
    tokens: int
    regular: bool = True


@dataclass
class Counts:
    """What happened over some seeds: a fuzz that never gets anywhere is worth nothing."""

    steps: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    alone: int = 0
    hits: int = 0
    resumed: int = 0
    followers: int = 0
    passed: int = 0
    bands: int = 0
    padded: int = 0


def draw_limits(rng: random.Random) -> Limits:
    """Limits under which every prompt of up to 64 tokens fits alone, and seldom much more."""
    recurrent = rng.random() < 0.25
    geometry = rng.choice(RECURRENT if recurrent else GEOMETRIES)
    rows = rng.choice([1, 2, 4, 6, 8, 12])
    limits = Limits(
        max_rows=rows,
        max_step_tokens=rows + rng.choice([8, 40, 130, 300, 1024]),
        kv_bytes=1 << 60,
        geometry=geometry,
        checkpoint=rng.choice([16, 64]) if recurrent else None,
        chunk_multiple=rng.choice([1, 2, 8, 64, 128, rng.randrange(1, 129)]),
        max_scored=rng.choice([1, 20, 512]),
        avoid_partial_prefill=rng.random() < 0.5,
        lookahead_columns=rng.choice([0, 0, 64, 512]),
        step_seconds=rng.choice([math.inf, math.inf, math.inf, 0.03, 1e-4]),
        max_step_stretch=rng.choice([0.0, 1.75]),
        bands=1 if recurrent else rng.randrange(1, 5),
        band_bytes=rng.choice([1, 5_000, 50_000]),
        ageing=rng.choice([0.1, 10.0]),
        bypass=rng.choice([0.0, 0.5, 2.0, 1000.0]),
    )
    longest = rng.choice([130, 200, 220, 300, 500])
    return replace(
        limits, kv_bytes=int(limits.bytes_alone(longest) * rng.choice([1, 1.5, 2, 2, 3]))
    )


class Fuzz:
    """One seed: serves its requests, and checks every plan.

    Raises:
        AssertionError: a limit was broken, a sequence was lost or overtaken, or nobody gets on.
    """

    def __init__(self, seed: int, counts: Counts) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = counts
        self.limits = draw_limits(rng)
        self.prefixes = rng.random() < 0.7
        self.swaps = rng.random() < 0.5
        self.scheduler = Scheduler(
            self.limits,
            self._cached if self.prefixes else None,
            lambda s: s in self.on_disk,
            lambda s: self.swapped.get(s, 0),
        )
        multiple = self.limits.chunk_multiple
        borders = [multiple * rng.randrange(1, 4) + less for less in (-1, 0, 1)]
        self.lengths, self.outputs = rng.choice(
            [
                ([1, 2, 63, 64, 65, 128, 129, 256, rng.randrange(1, 400)], [0, 1, 2, 30]),
                (borders, [1, 2, 40]),
                ([rng.randrange(1, 65)], [100, 150]),
            ]
        )
        self.aborts = rng.choice([0.0, 0.0, 0.01])
        self.ended_early = rng.choice([0.0, 0.0, 0.03])
        self.clock = 0.0
        self.known: list[tuple[str, tuple[int, ...]]] = []
        self.swapped: dict[Sequence, int] = {}
        self.on_disk: set[Sequence] = set()
        self.caches: dict[Sequence, Cache] = {}
        self.arriving: dict[Sequence, Cache] = {}
        self.capacities = (NO_CAPACITY,) * self.limits.bands
        self.places: dict[Sequence, int] = {}
        self.rows: list[Sequence] = []
        self.in_flight: list[Sequence] = []
        self.ends: list[Sequence] = []
        # By request: choices that are still to end.
        self.open: dict[str, int] = {}
        trunk = [rng.randrange(9) for _ in range(600)]
        self.trunks = [trunk, [*trunk[:70], *(rng.randrange(9) for _ in range(500))]]

    def run(self) -> None:
        """Requests come, some are aborted, and all the others are served."""
        rng, coming = self.rng, self.rng.randrange(3, 10)
        burst = rng.choice([1, 4, 100])
        for number in range(coming):
            self._submit(str(number))
            for _ in range(0 if number % burst else rng.randrange(12)):
                self._step()
        for _ in range(PATIENCE):
            if not self.open and not self.in_flight:
                break
            self._step()
        assert not self.open, f"they are not served: {self.open}"
        assert list(self.scheduler) == []
        self._step()
        assert not any(capacity.rows for capacity in self.capacities), "rows that nobody has"
        assert not self.caches

    def _submit(self, name: str) -> None:
        rng = self.rng
        longest = min(600, self.limits.max_context)
        tokens = rng.choice(self.lengths)
        tokens = max(1, min(tokens, longest - 1))
        most = min(rng.choice(self.outputs), longest - tokens)
        trunk = rng.choice(self.trunks)
        kept = rng.choice([0, tokens // 2, tokens - 3, tokens])
        prompt = [*trunk[: max(0, kept)], *(rng.randrange(9, 99) for _ in range(tokens))][:tokens]
        n = rng.choice([1, 1, 1, 1, 2, 3, self.limits.max_rows + rng.randrange(2)]) if most else 1
        sequence = Sequence(
            *(name, prompt, most),
            n=n,
            arrival=self.clock,
            priority=rng.choice([0, 0, 0, -2, 1, 100]),
            cache_salt=rng.choice(["", "", "tenant"]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        self.open[name] = n
        self.scheduler.add(sequence)
        self.scheduler.check_integrity()

    def _cached(self, sequence: Sequence) -> int:
        """As the prefix cache answers: of recurrent states only those at a border."""
        own = [tokens for salt, tokens in self.known if salt == sequence.cache_salt]
        shared = max((common_tokens(sequence, tokens) for tokens in own), default=0)
        sequence.shared = shared
        border = self.limits.checkpoint or 1
        return min(shared, len(sequence.tokens) - 1) // border * border

    def _step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        self.clock += rng.choice([0.0, 0.01, 0.3])
        self.counts.steps += 1
        self._mishap()
        plan = scheduler.plan(self.capacities)
        self._check(plan)
        computed = {s: s.computed for s in plan.preempted}
        scheduler.commit(plan)
        for sequence, tokens in computed.items():
            if self.swaps and tokens and rng.random() < 0.7:
                self.swapped[sequence] = tokens
        for sequence in plan.cached:
            self.swapped.pop(sequence, None)
        self._compute(plan)
        if self.limits.step_seconds < math.inf and (plan.work.tokens or plan.work.rows):
            scheduler.learn(plan.work, rng.choice([1e-6, 1e-3, 0.05]))
        for sequence in self.in_flight:
            if not sequence.finished:
                scheduler.token(sequence, rng.randrange(99, 200))
                if (
                    len(sequence.tokens) == sequence.max_total_tokens
                    or rng.random() < self.ended_early
                ):
                    self._finish(sequence)
        for sequence in self.ends:
            if not sequence.finished:
                self._finish(sequence)
        scheduler.check_integrity()
        self.in_flight = [*plan.decode, *plan.joins]
        self.ends = list(plan.ends)

    def _mishap(self) -> None:
        """Aborts, evictions, states that go to disk and come back."""
        rng, scheduler = self.rng, self.scheduler
        if self.open and rng.random() < self.aborts:
            for sequence in scheduler.sequences_of(rng.choice(list(self.open))):
                self.counts.aborted += 1
                self._finish(sequence)
        if self.known and rng.random() < 0.05:
            self.known.pop(rng.randrange(len(self.known)))
        for sequence in self.swapped:
            ready = sequence in scheduler.waiting and sequence not in self.on_disk
            if ready and rng.random() < 0.2:
                self.on_disk.add(sequence)
                scheduler.waiting.block(sequence)
        self.on_disk = {s for s in self.on_disk if rng.random() < 0.9 and not s.finished}

    def _finish(self, sequence: Sequence) -> None:
        self.counts.finished += 1
        self.scheduler.finish(sequence)
        self.swapped.pop(sequence, None)
        self.on_disk.discard(sequence)
        self.open[sequence.request_id] -= len(sequence.choices)
        assert self.open[sequence.request_id] >= 0, "a choice that ends twice"
        if not self.open[sequence.request_id]:
            del self.open[sequence.request_id]

    def _check(self, plan: Plan) -> None:
        """Everything that a step takes, by what the engine does with such a plan."""
        limits, scheduler = self.limits, self.scheduler
        geometry = limits.geometry
        for sequence in list(self.caches):
            if sequence.finished or sequence in plan.preempted:
                del self.caches[sequence]
        assert set(self.caches) == set(scheduler.prefilling) - set(plan.preempted)
        for sequence, begun in plan.cached.items():
            size = limits.prompt_size(sequence.num_tokens, begun)
            nbytes = geometry.reserved(Capacity(1, size.columns), size.step)
            self.caches[sequence] = Cache(size, nbytes, begun)
            assert begun < sequence.num_tokens <= size.columns
            self._check_order(plan, sequence)
        for sequence, tokens in plan.chunks.items():
            self._check_chunk(sequence, tokens, sequence in {*plan.joins.values()})
        running = [s for s in scheduler.running if s.num_tokens < s.max_total_tokens]
        assert set(plan.decode) == set(running) - set(plan.preempted)
        assert plan.leaves == [s for s in self.rows if s not in plan.decode]
        assert set(plan.decode) <= set(self.rows)
        rows = len(plan.decode) + sum(s.rows for s in self.caches)
        assert rows <= limits.max_rows, (rows, limits)
        assert len(plan.decode) + plan.prefill_tokens <= limits.max_step_tokens
        scored = sum(tokens for s, tokens in plan.chunks.items() if s.scored)
        assert scored <= limits.max_scored
        for band, taken in Counter(plan.decode.values()).items():
            assert taken <= plan.capacities[band].rows
        for sequence, band in plan.decode.items():
            assert sequence.num_tokens <= plan.capacities[band].columns
        changed = [
            s.num_tokens for s, band in plan.decode.items() if self.places.get(s, band) != band
        ]
        arriving = {id(c): c.nbytes for s, c in self.arriving.items() if s in plan.decode}
        held = geometry.moved_bands(self.capacities, plan.capacities) + geometry.used(changed)
        held += sum(cache.nbytes for cache in self.caches.values()) + sum(arriving.values())
        assert held <= limits.kv_bytes, (held, limits)
        self._count(plan)

    def _check_chunk(self, sequence: Sequence, tokens: int, ends: bool) -> None:
        """As ``engine.model.forward`` pads the last chunk of a prompt."""
        cache, multiple = self.caches[sequence], self.limits.chunk_multiple
        assert 0 < tokens <= sequence.num_tokens - cache.tokens
        begun = sequence.computed or cache.tokens
        assert cache.tokens == begun, "the cache is where the sequence is"
        step = padded(tokens, multiple) if ends else tokens
        if cache.tokens + step > cache.size.columns:
            assert not cache.regular, "there is room for the padding, unless chunks are odd"
            step = tokens
        cache.regular &= tokens % multiple == 0
        self.counts.padded += step > tokens
        assert cache.tokens + step <= cache.size.columns
        assert step <= cache.size.step, "a window is too short for the chunk"
        cache.tokens += tokens

    def _check_order(self, plan: Plan, begins: Sequence) -> None:
        """Whoever is due earlier and could begin does, or waits for rows and is passed in time."""
        for other in self.scheduler.waiting.ready:
            if other.rank > begins.rank:
                break
            if other not in plan.cached:
                self.counts.passed += 1
                assert other.rows > 1, "it is passed by another one"
                assert begins.due <= other.due + self.limits.bypass

    def _compute(self, plan: Plan) -> None:
        """What the engine's caches are once the plan is launched."""
        for sequence in plan.chunks:
            if self.prefixes and not sequence.bypasses_prefix_cache:
                kept = tuple(sequence.tokens[: self.caches[sequence].tokens])
                self.known.append((sequence.cache_salt, kept))
        del self.known[:-8]
        self.arriving = {choice: self.caches[own] for choice, own in plan.joins.items()}
        for sequence in {*plan.joins.values(), *plan.ends.values()}:
            del self.caches[sequence]
        self.capacities = plan.capacities
        self.places = plan.decode
        self.rows = [*plan.decode, *plan.joins]

    def _count(self, plan: Plan) -> None:
        counts = self.counts
        counts.preempted += len(plan.preempted)
        counts.alone += bool(plan.preempted) and not plan.decode and not self.caches
        counts.followers += len(self.scheduler.waiting._followers)
        counts.bands += sum(capacity.rows > 0 for capacity in plan.capacities) > 1
        for sequence, begun in plan.cached.items():
            counts.resumed += sequence in self.swapped
            counts.hits += begun > 0 and sequence not in self.swapped


def common_tokens(sequence: Sequence, tokens: tuple[int, ...]) -> int:
    """How many first tokens a sequence shares with others."""
    return common(sequence.ids, type(sequence.ids)(sequence.ids.typecode, tokens))


def main() -> int:
    """Runs seeds of the command line; 1 if any has failed."""
    first, count = map(int, sys.argv[1:3])
    counts, failed, began = Counts(), 0, time.monotonic()
    for seed in range(first, first + count):
        try:
            Fuzz(seed, counts).run()
        except Exception:
            failed += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
    print(f"{count} seeds, {failed} failed, {time.monotonic() - began:.0f} s: {counts}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
