"""A scheduler against a model of the engine's memory: random limits, requests and mishaps.

``python -m support.scheduler.fuzz FIRST COUNT [pages]``, in ``tests``, runs seeds and prints
failures.
"""

from __future__ import annotations

import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from support.scheduler.fuzz_counts import Cache, Counts
from support.scheduler.fuzz_limits import draw_drafts, draw_limits
from support.scheduler.page_pools import TOKENS, PagePools

from chairlift.cache.capacity import Capacity, padded
from chairlift.cache.token_ids import common
from chairlift.scheduler.columns import PromptSize
from chairlift.scheduler.drafts import Chosen
from chairlift.scheduler.plan import NO_CAPACITY, Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

# Most steps of a seed until all requests are served: a hundred times what most seeds take.
PATIENCE = 20_000


class Fuzz:
    """One seed: serves its requests, and checks every plan.

    Raises:
        AssertionError: a limit was broken, or a sequence was lost, overtaken or starved.
    """

    def __init__(self, seed: int, counts: Counts, paged: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = counts
        self.limits = draw_limits(rng, paged)
        self.pools = PagePools(self.limits) if paged else None
        # The step that a prompt began in last, and whether its memory left room for rows to grow.
        self.last_begun, self.spare = 0, True
        self.has_prefix_cache = rng.random() < 0.7
        self.swaps = rng.random() < 0.5
        self.scheduler = Scheduler(
            self.limits,
            self._cached if self.has_prefix_cache else None,
            lambda s: s in self.on_disk,
            lambda s: self.swapped.get(s, 0),
        )
        multiple = self.limits.chunk_multiple
        borders = [multiple * rng.randrange(1, 4) + less for less in (-1, 0, 1)]
        self.lengths, self.outputs = rng.choice(
            [
                ([1, 2, 63, 64, 65, 128, 129, 256, rng.randrange(1, 400)], [0, 1, 2, 30]),
                (borders, [0, 1, 2, 40]),
                ([rng.randrange(1, 65)], [100, 150]),
                *([([128, 129, 190], [30, 70, 150]), ([600], [0, 1, 30])] if paged else []),
            ]
        )
        self.aborts = rng.choice([0.0, 0.0, 0.01])
        self.ended_early = rng.choice([0.0, 0.0, 0.03])
        self.clock = 0.0
        self.prefix_cache: list[tuple[str, tuple[int, ...]]] = []
        self.swapped: dict[Sequence, int] = {}
        self.on_disk: set[Sequence] = set()
        self.caches: dict[Sequence, Cache] = {}
        self.joining: dict[Sequence, Cache] = {}
        self.capacities = (NO_CAPACITY,) * self.limits.bands
        self.places: dict[Sequence, int] = {}
        self.rows: list[Sequence] = []
        self.in_flight: list[Sequence] = []
        self.ends: list[Sequence] = []
        self.drafts: Mapping[Sequence, Seq[int]] = {}
        self.drafting = rng.choice([0.0, 0.3, 1.0]) if self.limits.draft_tokens else 0.0
        # Request id -> choices that have not ended yet.
        self.open: dict[str, int] = {}
        trunk = [rng.randrange(9) for _ in range(600)]
        self.trunks = [trunk, [*trunk[:70], *(rng.randrange(9) for _ in range(500))]]

    def run(self) -> None:
        """Submits requests, aborts some, and steps until all others are served."""
        rng, requests = self.rng, self.rng.randrange(3, 10)
        burst = rng.choice([1, 4, 100])
        for number in range(requests):
            self._submit(str(number))
            for _ in range(0 if number % burst else rng.randrange(12)):
                self._step()
        for _ in range(PATIENCE):
            if not self.open and not self.in_flight:
                break
            self._step()
        assert not self.open, f"not served: {self.open}"
        assert list(self.scheduler) == []
        self._step()
        assert not any(capacity.rows for capacity in self.capacities), (
            "capacity for rows that do not exist"
        )
        assert not self.caches

    def _submit(self, name: str) -> None:
        rng = self.rng
        longest = min(600, self.limits.max_context)
        tokens = rng.choice(self.lengths)
        outputs = rng.choice(self.outputs)
        tokens = max(1, min(tokens, longest - min(1, outputs)))
        outputs = min(outputs, longest - tokens)
        trunk = rng.choice(self.trunks)
        shared = rng.choice([0, tokens // 2, tokens - 3, tokens])
        prompt = [*trunk[: max(0, shared)], *(rng.randrange(9, 99) for _ in range(tokens))][:tokens]
        many = [1, 1, 1, 1, 2, 3, self.limits.max_rows + rng.randrange(2)]
        n = rng.choice(many) if outputs else 1
        sequence = Sequence(
            *(name, prompt, outputs),
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
        """Cached tokens as the prefix cache finds them: recurrent states only at checkpoints."""
        prefixes = [tokens for salt, tokens in self.prefix_cache if salt == sequence.cache_salt]
        shared = max((common_tokens(sequence, tokens) for tokens in prefixes), default=0)
        sequence.shared = shared
        border = self.limits.checkpoint or 1
        return min(shared, len(sequence.tokens) - 1) // border * border

    def _step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        self.clock += rng.choice([0.0, 0.01, 0.3])
        self.counts.steps += 1
        self._mishap()
        drafts: Chosen = {}
        if self.drafts or rng.random() < self.drafting:
            self._read()  # drafts follow known tokens
            drafts = draw_drafts(rng, self.limits, scheduler.running)
        plan = scheduler.plan(self.capacities, drafts)
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
        self._read()
        scheduler.check_integrity()
        self.in_flight = [*plan.decode, *plan.joins]
        self.drafts = plan.drafts
        self.ends = list(plan.ends)

    def _read(self) -> None:
        """Reads the tokens of the step before, of drafts as many as turn out to be right."""
        rng = self.rng
        for sequence in self.in_flight:
            if not sequence.finished:
                kept = rng.randrange(len(self.drafts.get(sequence, ())) + 1)
                self.scheduler.read(sequence, [rng.randrange(99, 200) for _ in range(kept + 1)])
                self.counts.accepted += kept
                if (
                    len(sequence.tokens) == sequence.max_total_tokens
                    or rng.random() < self.ended_early
                ):
                    self._finish(sequence)
        for sequence in self.ends:
            if not sequence.finished:
                self._finish(sequence)
        self.in_flight, self.ends, self.drafts = [], [], {}

    def _mishap(self) -> None:
        """Random aborts, evictions, and states that go to disk and come back."""
        rng, scheduler = self.rng, self.scheduler
        if self.open and rng.random() < self.aborts:
            for sequence in scheduler.sequences_of(rng.choice(list(self.open))):
                self.counts.aborted += 1
                self._finish(sequence)
        if self.prefix_cache and rng.random() < 0.05:
            self.prefix_cache.pop(rng.randrange(len(self.prefix_cache)))
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
        assert self.open[sequence.request_id] >= 0, "a choice ended twice"
        if not self.open[sequence.request_id]:
            del self.open[sequence.request_id]

    def _check(self, plan: Plan) -> None:
        """Checks rows, tokens and bytes of a plan as the engine would use them."""
        limits, scheduler = self.limits, self.scheduler
        for sequence in list(self.caches):
            if sequence.finished or sequence in plan.preempted:
                del self.caches[sequence]
        assert set(self.caches) == set(scheduler.prefilling) - set(plan.preempted)
        for sequence, begun in plan.cached.items():
            size = (
                PromptSize(sequence.num_tokens, limits.max_step_tokens)
                if limits.paged
                else limits.prompt_size(sequence.num_tokens, begun)
            )
            reserved = limits.geometry.reserved(Capacity(1, size.columns), size.step)
            self.caches[sequence] = Cache(sequence, size, reserved, begun)
            assert begun < sequence.num_tokens <= size.columns
            self._check_order(plan, sequence)
        begins = {sequence: self.caches[sequence].tokens for sequence in plan.chunks}
        spans = {s: (begins[s], begins[s] + tokens) for s, tokens in plan.chunks.items()}
        for sequence, tokens in plan.chunks.items():
            self._check_chunk(sequence, tokens, sequence in {*plan.joins.values()})
        running = [s for s in scheduler.running if s.num_tokens < s.max_total_tokens]
        assert set(plan.decode) == set(running) - set(plan.preempted)
        assert plan.leaves == [s for s in self.rows if s not in plan.decode]
        assert set(plan.decode) <= set(self.rows)
        rows = len(plan.decode) + sum(s.rows for s in self.caches)
        assert rows <= limits.max_rows, (rows, limits)
        assert set(plan.drafts) <= set(plan.decode)
        tokens = len(plan.decode) + sum(map(len, plan.drafts.values())) + plan.prefill_tokens
        assert tokens <= limits.max_step_tokens
        scored = sum(tokens for s, tokens in plan.chunks.items() if s.scored)
        assert scored <= limits.max_scored
        if self.pools:
            self._check_pages(self.pools, plan, spans)
        else:
            self._check_columns(plan)
        self._count(plan)

    def _check_pages(
        self, pools: PagePools, plan: Plan, spans: dict[Sequence, tuple[int, int]]
    ) -> None:
        """Checks that the step has its pages, and that what begins is not preempted at once."""
        assert plan.capacities == self.capacities
        assert set(plan.decode.values()) <= {0}
        parents = {choice: cache.sequence for choice, cache in self.joining.items()}
        pools.launch(plan.decode, parents, dict(plan.cached), spans, self.caches)
        self.counts.shared += pools.shared > 0
        if plan.preempted and self.spare:
            assert self.counts.steps - self.last_begun > TOKENS // 2, "it began too early"
        if plan.cached:
            self.last_begun = self.counts.steps
            self.spare = all(s.rows for s in self.caches)

    def _check_columns(self, plan: Plan) -> None:
        limits, geometry = self.limits, self.limits.columns.geometry
        longest = max(map(len, plan.drafts.values()), default=0)
        for band, taken in Counter(plan.decode.values()).items():
            assert taken <= plan.capacities[band].rows
        for sequence, band in plan.decode.items():
            assert sequence.num_tokens + longest <= plan.capacities[band].columns
        changed = [
            s.num_tokens for s, band in plan.decode.items() if self.places.get(s, band) != band
        ]
        joining = {id(c): c.nbytes for s, c in self.joining.items() if s in plan.decode}
        nbytes = geometry.moved_bands(self.capacities, plan.capacities) + geometry.used(changed)
        nbytes += sum(cache.nbytes for cache in self.caches.values()) + sum(joining.values())
        assert nbytes <= limits.kv_bytes, (nbytes, limits)

    def _check_chunk(self, sequence: Sequence, tokens: int, ends: bool) -> None:
        """Checks a chunk, padded as ``engine.model.forward`` pads the last one of a prompt."""
        cache = self.caches[sequence]
        multiple = 1 if self.limits.paged else self.limits.chunk_multiple
        assert 0 < tokens <= sequence.num_tokens - cache.tokens
        begun = sequence.computed or cache.tokens
        assert cache.tokens == begun, "cache and sequence agree"
        step = padded(tokens, multiple) if ends else tokens
        if cache.tokens + step > cache.size.columns:
            assert not cache.regular, "only irregular chunks may lack room for padding"
            step = tokens
        cache.regular &= tokens % multiple == 0
        self.counts.padded += step > tokens
        assert cache.tokens + step <= cache.size.columns
        assert step <= cache.size.step, "a window is too short for the chunk"
        cache.tokens += tokens

    def _check_order(self, plan: Plan, begins: Sequence) -> None:
        """An earlier request begins too, or waits for rows and is bypassed within the bound."""
        for other in self.scheduler.waiting.ready:
            if other.turn > begins.turn:
                break
            if other not in plan.cached:
                self.counts.passed += 1
                assert other.rows > 1, "it was overtaken"
                assert begins.turn[0] <= other.turn[0] + self.limits.bypass

    def _compute(self, plan: Plan) -> None:
        """Updates the model of the engine's caches as a launched plan does."""
        for sequence in plan.chunks:
            if self.has_prefix_cache and not sequence.bypasses_prefix_cache:
                prefix = tuple(sequence.tokens[: self.caches[sequence].tokens])
                self.prefix_cache.append((sequence.cache_salt, prefix))
        del self.prefix_cache[:-8]
        self.joining = {choice: self.caches[prompt] for choice, prompt in plan.joins.items()}
        for sequence in {*plan.joins.values(), *plan.ends.values()}:
            del self.caches[sequence]
        self.capacities, self.places = plan.capacities, plan.decode
        self.rows = [*plan.decode, *plan.joins]

    def _count(self, plan: Plan) -> None:
        counts = self.counts
        counts.preempted += len(plan.preempted)
        counts.alone += bool(plan.preempted) and not plan.decode and not self.caches
        counts.followers += len(self.scheduler.waiting._followers)
        counts.bands += sum(capacity.rows > 0 for capacity in plan.capacities) > 1
        counts.resumed += sum(s in self.swapped for s in plan.cached)
        counts.hits += sum(n > 0 and s not in self.swapped for s, n in plan.cached.items())


def common_tokens(sequence: Sequence, tokens: tuple[int, ...]) -> int:
    """The length of the common prefix of a sequence and ``tokens``."""
    return common(sequence.ids, type(sequence.ids)(sequence.ids.typecode, tokens))


def main() -> int:
    """Runs the seeds of the command line; returns 1 if any failed."""
    first, count = map(int, sys.argv[1:3])
    paged = sys.argv[3:] == ["pages"]
    counts, failed, began = Counts(), 0, time.monotonic()
    for seed in range(first, first + count):
        try:
            Fuzz(seed, counts, paged).run()
        except Exception:
            failed += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
    print(f"{count} seeds, {failed} failed, {time.monotonic() - began:.0f} s: {counts}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
