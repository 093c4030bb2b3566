"""Plans steps: the sequence that is due first is served first, within the limits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count, islice

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.bands import ONE_BAND, Bands
from chairlift.scheduler.capacity_planner import MOVES, CapacityPlanner
from chairlift.scheduler.chunks import Chunks
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.queue import Queue
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import Sibling, sibling_of

# How many waiting sequences that cannot begin a plan looks past: this bounds its cost.
PASSED = 8
NOTHING = Capacity(0, 0)
NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes.

    Attributes:
        chunks: how many tokens of which prompts are computed.
        cached: the sequences that begin, and how many of their first tokens need not be computed,
            because the prefix cache or a swapped state has them.
        decode: the rows that gain a token, and the band that each is in, or changes to.
        joins: the choices whose prompt ends with its chunk, and the sequence whose state each
            starts from. They gain their first token in this step and join the batch in the next.
        ends: the same for choices that end with their prompt and never have a row.
        preempted: sequences that lose their place and wait again.
        leaves: sequences that had a row in the step before and have none in this one: they are
            finished, preempted, or have all their tokens in flight.
        capacities: what each band has to hold.
        bands: which columns belong to which band.
        work: what the step costs, for the forecast of its time.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    cached: Mapping[Sequence, int] = field(default_factory=dict)
    decode: dict[Sequence, int] = field(default_factory=dict)
    joins: dict[Sequence, Sequence] = field(default_factory=dict)
    ends: dict[Sequence, Sequence] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    leaves: list[Sequence] = field(default_factory=list)
    capacities: tuple[Capacity, ...] = (NOTHING,)
    bands: Bands = ONE_BAND
    work: Work = NO_WORK

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens this step computes."""
        return sum(self.chunks.values())


class Scheduler:
    """Holds every unfinished sequence and plans steps. Deterministic.

    A sequence is due at its arrival, later by ``Limits.ageing`` for each step that its priority is
    above 0, and earlier for each below. The one that is due first goes first: within a class this
    is first come, first served, and no sequence starves. The order never changes, and planning does
    not cost more when the queue is longer.

    Two sorts of sequences let others begin before them. One finds too few free rows for its
    choices: it lets those pass that are due at most ``Limits.bypass`` seconds later. The other
    waits for a sibling, whose prompt is being computed and begins with the same tokens.

    A step is ``plan()``, then ``commit(plan)`` once it has been launched. ``token()`` and
    ``finish()`` report back what came of it, which may be one step later.

    Args:
        cached: how many of a sequence's first tokens the prefix cache can give at the moment, at
            most all but the last, whose logits are wanted; None: there is no cache.
        fetching: whether more of them is on its way there, asked when a sequence is queued, and
            from then on while it is. Such a sequence keeps its place in the queue, and those
            behind it go first.
        swapped: how many first tokens the state covers that was taken out of a preempted sequence's
            row and kept, at most all but the last; 0: it has to be computed again. While that is
            on disk, which ``Queue.block`` tells, it is ``fetching`` as well.
    """

    def __init__(
        self,
        limits: Limits,
        cached: Callable[[Sequence], int] | None = None,
        fetching: Callable[[Sequence], bool] = lambda sequence: False,
        swapped: Callable[[Sequence], int] = lambda sequence: 0,
    ) -> None:
        self.limits = limits
        self._cached = cached
        self._swapped = swapped
        self.waiting = Queue(fetching)
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        # Of the running, whose states are yet to be copied into the batch, and from where.
        self._arriving: dict[Sequence, Sequence] = {}
        # The sequences that have a row in the step that was planned last.
        self._rows: list[Sequence] = []
        self._bands = ONE_BAND
        self._by_request: dict[str, dict[Sequence, None]] = {}
        self._numbers = count()
        self._sizes = Chunks(limits)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left to compute or read, apart from sequences that are blocked."""
        return not self.prefilling and not self.running and self.waiting.idle

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request; none if it is not known."""
        return list(self._by_request.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence, or its separate choices where these cannot fit all at once."""
        sequence.due = sequence.arrival + sequence.priority * self.limits.ageing
        sequence.number = next(self._numbers)
        at_once = Capacity(sequence.rows, sequence.num_tokens + COLUMN_STEP)
        prompt = self.limits.most_prompt_bytes(sequence.num_tokens)
        fits = self.limits.choose([at_once], [at_once], [NOTHING], besides=prompt) is not None
        shared = fits and sequence.rows <= self.limits.max_rows
        for queued in [sequence] if shared else sequence.fork():
            self._by_request.setdefault(sequence.request_id, {})[queued] = None
            self.waiting.add(queued)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence in whatever state it is; its row leaves with the next step."""
        sequence.finished = True
        own = self._by_request[sequence.request_id]
        del own[sequence]
        if not own:
            del self._by_request[sequence.request_id]
        for place in (self.running, self.prefilling, self.waiting):
            if sequence in place:
                place.remove(sequence)
                break

    def token(self, sequence: Sequence, token: int) -> None:
        """Records one of a sequence's tokens in flight as read."""
        sequence.in_flight -= 1
        sequence.tokens.append(token)

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        self._sizes.learn(work, seconds)

    def plan(self, now: Seq[Capacity]) -> Plan:
        """What to compute next, when the bands of the decode batch have the capacities ``now``.

        Changes nothing but which sequences of the queue are blocked.
        """
        self.waiting.unblock_ready()
        decode = [s for s in self.running if s.num_tokens < s.max_total_tokens]
        prefill = list(self.prefilling)
        preempted = []
        room = self._room(decode, prefill, now, MOVES)
        while (capacities := room.capacities()) is None:
            if not room.moved:
                sequence = _first_to_yield([*decode, *prefill])
                (prefill if sequence in prefill else decode).remove(sequence)
                preempted.append(sequence)
            room = self._room(decode, prefill, now, moves=0)
        alone = work = Work(len(decode), room.context)
        seconds = self._sizes.seconds(work)
        chunks: dict[Sequence, int] = {}
        cached: dict[Sequence, int] = {}
        begun = deque(sorted(prefill, key=lambda s: s.rank))
        followers: list[tuple[Sequence, Sibling]] = []
        passed, last_due = 0, math.inf
        # A sequence preempted just now may be due before those that wait.
        for sequence in () if preempted else self.waiting.ready:
            if passed == PASSED or sequence.due > last_due:
                break
            while begun and begun[0].rank < sequence.rank:
                work = self._continue_prefill(begun.popleft(), work, seconds, chunks)
            # Cheap questions first: the prefix cache is asked only for those that could begin.
            free = self.limits.max_rows - room.rows
            if sequence.rows > free > 0:
                passed += 1
                last_due = min(last_due, sequence.due + self.limits.bypass)
                continue
            if sequence.rows > free or self._sizes.tokens_left(sequence, 0, work, seconds) < 1:
                break
            fits = room.capacities(sequence, self.limits.least_prompt_bytes(sequence.num_tokens))
            if fits is None:
                break
            begin = self._admissible_prefix(sequence, prefill)
            if isinstance(begin, Sibling):
                passed += 1
                followers.append((sequence, begin))
                continue
            tokens = self._sizes.size(sequence, begin, work, seconds)
            if not tokens:
                break
            cut = self.limits.avoid_partial_prefill and tokens < sequence.num_tokens - begin
            if cut and self._sizes.size(sequence, begin, alone, seconds) > tokens:
                break
            prompt_bytes = self.limits.prompt_bytes(sequence.num_tokens, begin)
            fits = room.capacities(sequence, prompt_bytes)
            if fits is None:
                break
            capacities = fits
            prefill.append(sequence)
            room.add(sequence, prompt_bytes)
            cached[sequence] = begin
            chunks[sequence] = tokens
            work = work.with_chunk(begin, tokens, sequence.scored)
        for sequence, sibling in followers:
            self.waiting.set_behind(sequence, sibling)
        for sequence in begun:
            work = self._continue_prefill(sequence, work, seconds, chunks)
        ready = [s for s, n in chunks.items() if n == s.num_tokens - cached.get(s, s.computed)]
        choices = {choice: sequence for sequence in ready for choice in sequence.fork()}
        joins = {choice: sequence for choice, sequence in choices.items() if choice.rows}
        ends = {choice: sequence for choice, sequence in choices.items() if not choice.rows}
        leaves = [s for s in self._rows if s not in room.places]
        return Plan(
            *(chunks, cached, room.places, joins, ends, preempted, leaves),
            *(capacities, room.bands, work),
        )

    def commit(self, plan: Plan) -> None:
        """Counts what a launched plan computes."""
        for sequence in plan.cached:
            self.waiting.remove(sequence)
            self.prefilling.append(sequence)
            begin = plan.cached[sequence]
            sequence.begin(begin, self.limits.prompt_bytes(sequence.num_tokens, begin))
        for sequence in plan.preempted:
            sequence.start_over()
            self.waiting.add(sequence)
        for sequence, tokens in plan.chunks.items():
            sequence.computed += tokens
        computed = {**plan.joins, **plan.ends}
        ended = {*plan.preempted, *computed.values()}
        self.prefilling = [s for s in self.prefilling if s not in ended]
        self.running = [s for s in self.running if s not in ended] + list(computed)
        self._rows = [*plan.decode, *plan.joins]
        self._arriving = plan.joins
        self._bands = plan.bands
        for sequence, band in plan.decode.items():
            sequence.band = band
        for choice, parent in computed.items():
            choice.cached = parent.cached
            choice.prompt_logprobs = None
            own = self._by_request[choice.request_id]
            own.pop(parent, None)
            own[choice] = None
        for sequence in plan.ends:
            sequence.computed = sequence.num_tokens
        for sequence in (*plan.decode, *plan.joins):
            sequence.computed = sequence.num_tokens
            sequence.in_flight += 1

    def _admissible_prefix(self, sequence: Sequence, prefill: list[Sequence]) -> int | Sibling:
        """How many tokens of a waiting sequence are cached, or the sibling that it should wait for.

        The prompts in ``prefill`` are being computed, or begin in this step.
        """
        if swapped := self._swapped(sequence):
            return swapped
        if self._cached is None or sequence.bypasses_prefix_cache:
            return 0
        cached = self._cached(sequence)
        return sibling_of(sequence, cached, prefill) or cached

    def _continue_prefill(
        self, sequence: Sequence, work: Work, seconds: float, chunks: dict[Sequence, int]
    ) -> Work:
        """Adds the next chunk of a prompt that has begun, if the step has room for it."""
        tokens = self._sizes.size(sequence, sequence.computed, work, seconds)
        if not tokens:
            return work
        chunks[sequence] = tokens
        return work.with_chunk(sequence.computed, tokens, sequence.scored)

    def _room(
        self, decode: list[Sequence], prefill: list[Sequence], now: Seq[Capacity], moves: int
    ) -> CapacityPlanner:
        arriving = {s: self._arriving[s] for s in decode if s in self._arriving}
        coming = (*self.prefilling, *islice(self.waiting.ready, self.limits.max_rows))
        return CapacityPlanner(
            self.limits, decode, prefill, arriving, coming, now, self._bands, moves
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        everyone = list(self)
        self.waiting.check_integrity()
        assert {s for own in self._by_request.values() for s in own} == set(everyone)
        assert all(self._by_request.values())
        assert len(set(map(id, everyone))) == len(everyone)
        assert sum(s.num_tokens < s.max_total_tokens for s in self.running) <= self.limits.max_rows
        numbers, ceilings = zip(*self._bands, strict=True)
        assert len(set(numbers)) == len(numbers), self._bands
        assert {*numbers, *(s.band for s in self.running)} <= set(range(self.limits.bands))
        assert list(ceilings) == sorted(set(ceilings)), self._bands
        assert ceilings[-1:] == ONE_BAND[0][1:], self._bands
        for sequence in everyone:
            assert not sequence.finished
            assert 0 <= sequence.computed <= sequence.num_tokens <= sequence.max_total_tokens
        for sequence in self.running:
            assert sequence.forked
            assert sequence.computed == sequence.num_tokens - (1 if sequence.rows else 0)
        for sequence in self.waiting:
            assert sequence.computed == 0


def _first_to_yield(sequences: list[Sequence]) -> Sequence:
    """Picks the preemption victim: lowest class, latest due, never the globally first.

    The first always fits alone (``Limits.max_context``), so one sequence always advances, and each
    becomes the first in time. It may not fit beside the buffers that others leave behind: then it
    yields as well, and is the first to begin in the next step, when these are gone.
    """
    first = min(sequences, key=lambda s: s.rank)
    others = [s for s in sequences if s is not first]
    return max(others or [first], key=lambda s: (s.priority, s.rank))
