"""Plans steps: serves sequences in the order of their turns, within the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count, islice
from typing import NamedTuple

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.chunks import Chunks
from chairlift.scheduler.cost import Work
from chairlift.scheduler.drafts import Chosen, DraftChooser, Drafts
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.queue import Queue
from chairlift.scheduler.sequence import Sequence, first_to_yield
from chairlift.scheduler.siblings import Sibling, sibling_of
from chairlift.scheduler.step_memory.bands import ONE_BAND
from chairlift.scheduler.step_memory.capacity_planner import MAX_MOVES
from chairlift.scheduler.step_memory.memory_plan import MemoryPlan, plan_memory
from chairlift.scheduler.step_prompts import StepPrompts

NO_DRAFTS: Mapping[Sequence, Seq[int]] = {}


class _Room(NamedTuple):
    """The rows of a step, the prompts that have begun, and the memory for both.

    Attributes:
        decode: the sequences whose rows gain a token.
        prefill: the prompts that have begun.
        preempted: the sequences that yield.
        drafts: the drafts that the step verifies.
        memory: the memory of the step.
        capacities: the capacities of the bands.
        work: the work of the step without prompts.
    """

    decode: list[Sequence]
    prefill: list[Sequence]
    preempted: list[Sequence]
    drafts: Chosen
    memory: MemoryPlan
    capacities: tuple[Capacity, ...]
    work: Work


class Scheduler:
    """Holds every unfinished sequence and plans steps. Deterministic.

    A sequence is due at its arrival, later by ``Limits.ageing`` for each level of priority above 0
    and earlier for each level below. The latest due is preempted first. The turn of a prompt is
    later than that by its slack: ``Limits.prefill_slack`` times the seconds that it takes alone,
    so that short prompts need not wait for long ones. The earliest turn goes first, and no
    sequence starves. A longer queue does not make planning more expensive.

    Two kinds of sequences are passed by others. A sequence that finds too few free rows for its
    choices is passed by those whose turn is at most ``Limits.bypass`` seconds later. A sequence
    that waits for a sibling (a prompt with the same beginning that is being computed) is passed by
    any other.

    A step is ``plan()``, then ``commit(plan)`` once it has been launched. ``read()`` and
    ``finish()`` report the results, which may come one step later.

    Args:
        cached: returns how many of a sequence's first tokens the prefix cache holds now, at most
            all but the last, whose logits are needed. None: there is no prefix cache.
        fetching: returns whether background work still loads a sequence's prefix, state or
            grammar. Each plan asks it about the sequences that are new or blocked. A blocked
            sequence keeps its place in the queue, and those after it go first.
        swapped: returns how many first tokens the swapped-out state of a preempted sequence
            covers, at most all but the last; 0: they have to be computed again. While the state is
            on disk (see ``Queue.block``), the sequence counts as ``fetching`` as well.
    """

    def __init__(
        self,
        limits: Limits,
        cached: Callable[[Sequence], int] | None = None,
        fetching: Callable[[Sequence], bool] = lambda sequence: False,
        swapped: Callable[[Sequence], int] = lambda sequence: 0,
    ) -> None:
        self.limits = limits
        self._memory = limits.memory
        self._cached = cached
        self._swapped = swapped
        self.waiting = Queue(fetching, self._slack)
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        # Running choices whose state is not in the batch yet, and the prompt it is copied from.
        self._joining: dict[Sequence, Sequence] = {}
        # The sequences with a row in the step that was committed last.
        self._rows: list[Sequence] = []
        # Whether that step had no prompts.
        self._rows_alone = False
        self._bands = ONE_BAND
        self._by_request: dict[str, dict[Sequence, None]] = {}
        self._numbers = count()
        self._chunk_sizes = Chunks(limits)
        # Over pages, recurrent states are computed again from the tokens that rows keep.
        self._drafts = DraftChooser(not limits.geometry.pads and not limits.paged)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left to compute or read, apart from sequences that are blocked."""
        return not self.prefilling and not self.running and self.waiting.idle

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request; empty if there is no such request."""
        return list(self._by_request.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence; as separate choices if the rows of all cannot fit together."""
        sequence.due = sequence.arrival + sequence.priority * self.limits.ageing
        sequence.number = next(self._numbers)
        fits = self._memory.fits_together(sequence.rows, sequence.num_tokens)
        together = fits and sequence.rows <= self.limits.max_rows
        for queued in [sequence] if together else sequence.fork():
            self._by_request.setdefault(sequence.request_id, {})[queued] = None
            self.waiting.add(queued)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, waiting or running; its row leaves with the next step."""
        sequence.finished = True
        siblings = self._by_request[sequence.request_id]
        del siblings[sequence]
        if not siblings:
            del self._by_request[sequence.request_id]
        for place in (self.running, self.prefilling, self.waiting):
            if sequence in place:
                place.remove(sequence)
                break

    def read(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Appends the tokens of a step to their sequence: the kept ones of its draft, and one.

        The last token is no longer in flight; those before it are already computed.
        """
        sequence.in_flight -= 1
        sequence.computed += len(tokens) - 1
        sequence.tokens += tokens

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        self._chunk_sizes.learn(work, seconds)
        self._drafts.learn(work, seconds)

    def choose_drafts(self, drafts: Drafts) -> Chosen:
        """The drafts that the next plan would verify, if memory is left for them."""
        decode = self._decode()
        rows = len(decode) + sum(s.rows for s in self.prefilling)
        # Drafts in every step would keep out all prompts.
        prompts = self._prompts(self.prefilling, rows)
        least = max(map(self._chunk_sizes.least, prompts), default=0)
        room = self.limits.max_step_tokens - len(decode) - least
        return self._drafts.choose(drafts, decode, max(0, room))

    def plan(self, now: Seq[Capacity], drafts: Chosen | None = None, spent: float = 0.0) -> Plan:
        """Plans the next step.

        This changes no state except which waiting sequences are blocked, and how long no draft was
        verified.

        Args:
            now: the present capacities of the bands.
            drafts: the result of ``choose_drafts``. No token may be in flight.
            spent: seconds of the step's time that other work has taken, such as encoding images.
                Chunks of prompts have the rest.
        """
        self.waiting.unblock_ready()
        room = self._make_room(now, drafts or {})
        upcoming = self._prompts(room.prefill, room.memory.rows)
        alone = bool(upcoming) and self._needs_rows_alone(room)
        if alone and room.drafts:
            room = self._make_room(now, {})
        self._drafts.count_step(len(room.decode), room.drafts)
        prompts = StepPrompts(
            *(self.limits, self._chunk_sizes, room.memory, self._admissible_prefix),
            *(room.prefill, room.capacities, room.work),
            self._step_seconds(room, upcoming) - spent,
        )
        if not alone:
            # After a preemption nothing begins: the preempted may be due before the waiting.
            prompts.fill(() if room.preempted else self.waiting.ready)
        for sequence, sibling in prompts.followers:
            self.waiting.set_behind(sequence, sibling)
        return self._plan_of(room, prompts)

    def commit(self, plan: Plan) -> None:
        """Updates all sequences for a plan whose step was launched."""
        for sequence in plan.cached:
            self.waiting.remove(sequence)
            self.prefilling.append(sequence)
            begin = plan.cached[sequence]
            sequence.begin(begin, self._memory.prompt_bytes(sequence.num_tokens, begin))
        for sequence in plan.preempted:
            sequence.start_over()
            self.waiting.add(sequence)
        for sequence, tokens in plan.chunks.items():
            sequence.computed += tokens
        computed = {**plan.joins, **plan.ends}
        if ended := {*plan.preempted, *computed.values()}:
            self.prefilling = [s for s in self.prefilling if s not in ended]
            self.running = [s for s in self.running if s not in ended] + list(computed)
        self._rows = [*plan.decode, *plan.joins]
        self._rows_alone = not plan.chunks
        self._joining = plan.joins
        self._bands = plan.bands
        for sequence, band in plan.decode.items():
            sequence.band = band
        for choice, parent in computed.items():
            choice.cached = parent.cached
            choice.prompt_logprobs = None
            choice.shares_prompt = choice is not parent
            siblings = self._by_request[choice.request_id]
            siblings.pop(parent, None)
            siblings[choice] = None
        for sequence in plan.ends:
            sequence.computed = sequence.num_tokens
        for sequence in (*plan.decode, *plan.joins):
            sequence.computed = sequence.num_tokens
            sequence.in_flight += 1

    def _decode(self) -> list[Sequence]:
        """The running sequences whose rows gain another token."""
        return [s for s in self.running if s.num_tokens < s.max_total_tokens]

    def _slack(self, sequence: Sequence) -> float:
        """The ``slack`` of a sequence that may begin now."""
        if sequence.generated:  # it was preempted, after others had their chance to overtake it
            return 0.0
        begin = self._computed_prefix(sequence)
        return self.limits.prefill_slack * self._chunk_sizes.prefill_seconds(sequence, begin)

    def _computed_prefix(self, sequence: Sequence) -> int:
        """The first tokens of a waiting sequence that are swapped out or cached."""
        if swapped := self._swapped(sequence):
            return swapped
        if self._cached is None or sequence.bypasses_prefix_cache:
            return 0
        return self._cached(sequence)

    def _admissible_prefix(self, sequence: Sequence, prefill: list[Sequence]) -> int | Sibling:
        """The number of cached tokens of a waiting sequence, or the sibling to wait for.

        ``prefill`` are the prompts that are being computed, or begin in this step.
        """
        begin = self._computed_prefix(sequence)
        if self._cached is None or sequence.bypasses_prefix_cache or self._swapped(sequence):
            return begin
        return sibling_of(sequence, begin, prefill) or begin

    def _make_room(self, now: Seq[Capacity], drafts: Chosen) -> _Room:
        """Lets sequences yield until the memory holds the rows and the prompts that have begun."""
        decode, prefill = self._decode(), list(self.prefilling)
        preempted: list[Sequence] = []
        memory = self._planner(decode, prefill, now, MAX_MOVES, drafts)
        while (capacities := memory.capacities()) is None:
            if drafts:
                drafts = {}
            elif not memory.moved:
                sequence = first_to_yield([*decode, *prefill])
                (prefill if sequence in prefill else decode).remove(sequence)
                preempted.append(sequence)
            memory = self._planner(decode, prefill, now, moves=0)
        work = Work(len(decode), memory.context, drafts=sum(map(len, drafts.values())))
        return _Room(decode, prefill, preempted, drafts, memory, capacities, work)

    def _needs_rows_alone(self, room: _Room) -> bool:
        """Whether a step leaves out prompts; see ``Chunks.needs_rows_alone``. Never two in turn."""
        return not self._rows_alone and self._chunk_sizes.needs_rows_alone(len(room.decode))

    def _step_seconds(self, room: _Room, upcoming: list[Sequence]) -> float:
        """The maximum seconds of a step; infinite if it cannot have prompts.

        A prediction takes time, and such a step needs none.

        Args:
            upcoming: the prompts that have begun, and the first waiting one.
        """
        first = min(upcoming, key=lambda s: s.turn, default=None)
        return math.inf if first is None else self._chunk_sizes.seconds(room.work, first)

    def _prompts(self, begun: list[Sequence], rows: int) -> list[Sequence]:
        """The prompts that have begun, and the first waiting one if any of ``rows`` is free."""
        first = next(self.waiting.ready, None)
        if first is None or (first.rows and rows >= self.limits.max_rows):
            return begun
        return [*begun, first]

    def _plan_of(self, room: _Room, prompts: StepPrompts) -> Plan:
        chunks, cached, places = prompts.chunks, prompts.cached, room.memory.places
        ready = [s for s, n in chunks.items() if n == s.num_tokens - cached.get(s, s.computed)]
        choices = {choice: sequence for sequence in ready for choice in sequence.fork()}
        joins = {choice: sequence for choice, sequence in choices.items() if choice.rows}
        ends = {choice: sequence for choice, sequence in choices.items() if not choice.rows}
        leaves = [s for s in self._rows if s not in places]
        return Plan(
            *(chunks, cached, places, joins, ends, room.preempted, leaves),
            *(room.drafts, prompts.capacities, room.memory.bands, prompts.work),
        )

    def _planner(
        self,
        decode: list[Sequence],
        prefill: list[Sequence],
        now: Seq[Capacity],
        moves: int,
        drafts: Mapping[Sequence, Seq[int]] = NO_DRAFTS,
    ) -> MemoryPlan:
        joining = {s: self._joining[s] for s in decode if s in self._joining}
        upcoming = (*self.prefilling, *islice(self.waiting.ready, self.limits.max_rows))
        # Rows with shorter drafts are padded to the longest.
        longest = max(map(len, drafts.values()), default=0)
        return plan_memory(
            *(self.limits, decode, prefill, joining, upcoming, now, self._bands, moves, longest)
        )

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between two steps."""
        sequences = list(self)
        self.waiting.check_integrity()
        by_request = self._by_request.values()
        assert {s for siblings in by_request for s in siblings} == set(sequences)
        assert all(by_request)
        assert len(set(map(id, sequences))) == len(sequences)
        assert sum(s.num_tokens < s.max_total_tokens for s in self.running) <= self.limits.max_rows
        numbers, ceilings = zip(*self._bands, strict=True)
        assert len(set(numbers)) == len(numbers), self._bands
        assert {*numbers, *(s.band for s in self.running)} <= set(range(self.limits.bands))
        assert list(ceilings) == sorted(set(ceilings)), self._bands
        assert ceilings[-1:] == ONE_BAND[0][1:], self._bands
        for sequence in sequences:
            assert not sequence.finished
            assert 0 <= sequence.computed <= sequence.num_tokens <= sequence.max_total_tokens
        for sequence in self.running:
            assert sequence.forked
            assert sequence.computed == sequence.num_tokens - (1 if sequence.rows else 0)
        for sequence in self.waiting:
            assert sequence.computed == 0
