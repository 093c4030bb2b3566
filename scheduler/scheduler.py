"""Who is computed in the next step: first come, first served, within the limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

# Prompts share a prefill while at most this part of its columns is padding.
MAX_PREFILL_PADDING = 0.25
# A prompt waits for another that is computed first, if it can save this many tokens by that.
MIN_SHARED = 32
NOTHING = Capacity(0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: ``prefill`` computes ``columns`` tokens of each of its sequences (fewer of those
    that end within), then every sequence of ``decode`` gains a token. ``joins`` are those of them
    that the prefill has just finished: each choice, and the sequence whose state it starts from.
    Whoever has a row and is not in ``decode`` leaves. ``capacity`` is what the decode batch has to
    hold. ``cached`` has the sequences that begin, and how many of their first tokens the prefix
    cache gives.
    """

    prefill: list[Sequence] = field(default_factory=list)
    cached: Mapping[Sequence, int] = field(default_factory=dict)
    columns: int = 0
    decode: list[Sequence] = field(default_factory=list)
    joins: dict[Sequence, Sequence] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    capacity: Capacity = NOTHING

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.preempted)

    def chunk(self, sequence: Sequence) -> int:
        """How many tokens of a prefill sequence this step computes."""
        return min(self.columns, _left(sequence, self.cached))

    def completes(self, sequence: Sequence) -> bool:
        """Whether a prefill sequence is ready to join after this step."""
        return _left(sequence, self.cached) <= self.columns

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens this step computes, padding not counted."""
        return sum(self.chunk(sequence) for sequence in self.prefill)

    @property
    def completed_prompts(self) -> int:
        """Prompts whose choices join the decode batch; each has its last token computed there."""
        return len(set(self.joins.values()))


class Scheduler:
    """Holds every unfinished sequence and plans steps. Deterministic.

    A step is ``plan()``, then ``commit(plan)`` once it has been launched. ``token()`` and
    ``finish()`` report back what came of it, which may be one step later.

    Args:
        cached: how many of a sequence's first tokens the prefix cache can give at the moment; at
            most all but the last, which is its first input in the batch. None: there is no cache.
    """

    def __init__(self, limits: Limits, cached: Callable[[Sequence], int] | None = None) -> None:
        self.limits = limits
        self._cached = cached
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.waiting

    @property
    def idle(self) -> bool:
        """Nothing is left to compute or to read back."""
        return not (self.waiting or self.prefilling or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence; as its separate choices, where all of them at once cannot fit."""
        at_once = Capacity(sequence.rows, sequence.wanted + COLUMN_STEP)
        prompt = self.limits.prefill_bytes(Capacity(1, sequence.wanted))
        fits = self.limits.choose(at_once, NOTHING, besides=prompt) is not None
        shared = fits and sequence.rows <= self.limits.max_rows
        self.waiting.extend([sequence] if shared else sequence.fork())

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it stands; its row leaves with the next step."""
        sequence.finished = True
        for place in (self.running, self.prefilling, self.waiting):
            if sequence in place:
                place.remove(sequence)

    def token(self, sequence: Sequence, token: int) -> None:
        """Records one of a sequence's tokens in flight as read."""
        sequence.in_flight -= 1
        sequence.tokens.append(token)

    def plan(self, now: Capacity) -> Plan:
        """What to compute next, when the decode batch has the capacity ``now``. Changes nothing."""
        decode = [s for s in self.running if s.wanted < s.most]
        prefill = list(self.prefilling)
        preempted = []
        capacity = self._capacity(decode, prefill, now)
        while capacity is None:
            # The youngest gives way; alone, the oldest always fits (Limits.max_context).
            preempted.append(prefill.pop() if prefill else decode.pop())
            capacity = self._capacity(decode, prefill, now)
        cached: dict[Sequence, int] = {}
        # A prompt that has begun goes on alone.
        if not prefill:
            cached, capacity = self._admit(decode, capacity, now)
            prefill = list(cached)
        columns = self._columns(decode, prefill, cached)
        ready = [s for s in prefill if _left(s, cached) <= columns]
        joins = {choice: sequence for sequence in ready for choice in sequence.fork()}
        return Plan(prefill, cached, columns, decode + list(joins), joins, preempted, capacity)

    def commit(self, plan: Plan) -> None:
        """Counts what a launched plan computes."""
        for sequence in plan.prefill:
            if self.waiting and self.waiting[0] is sequence:
                self.waiting.popleft()
        for sequence in plan.preempted:
            sequence.start_over()
            self.waiting.appendleft(sequence)
        for sequence in plan.prefill:
            chunk = plan.chunk(sequence)
            if sequence in plan.cached:
                sequence.begin(plan.cached[sequence])
            sequence.computed += chunk
        for choice, parent in plan.joins.items():
            choice.cached = parent.cached
        self.prefilling = [s for s in plan.prefill if s.to_prefill > 0]
        decoding = set(map(id, plan.decode))
        self.running = plan.decode + [
            s for s in self.running if id(s) not in decoding and s.wanted == s.most
        ]
        for sequence in plan.decode:
            sequence.computed = sequence.wanted
            sequence.in_flight += 1

    def _admit(
        self, decode: list[Sequence], capacity: Capacity, now: Capacity
    ) -> tuple[dict[Sequence, int], Capacity]:
        """Who begins to be computed, with the tokens that are cached; and the capacity with them.

        The queue's head, and with it whoever comes next and fits the same chunk without much
        padding, as far as rows and bytes allow. Who could take over what another one is about to
        compute waits for it.
        """
        group: dict[Sequence, int] = {}
        rows = len(decode)
        for sequence in self.waiting:
            rows += sequence.rows
            if rows > self.limits.max_rows:
                break
            wider = group | {sequence: self._cached(sequence) if self._cached else 0}
            if not self._shares_a_chunk(decode, wider) or self._gains(sequence, wider):
                break
            fits = self._capacity(decode, list(wider), now, COLUMN_STEP if decode or group else 0)
            if fits is None:
                break
            group, capacity = wider, fits
        return group, capacity

    def _gains(self, sequence: Sequence, group: Mapping[Sequence, int]) -> bool:
        """Whether it is worth waiting until the others of a group are computed."""
        if self._cached is None:
            return False
        least = group[sequence] + MIN_SHARED
        return any(
            _shared(sequence, other) >= least
            for other in group
            if other is not sequence and other.cache_salt == sequence.cache_salt
        )

    def _columns(
        self, decode: list[Sequence], prefill: list[Sequence], cached: Mapping[Sequence, int]
    ) -> int:
        """How many tokens of each prompt the step computes."""
        longest = max((_left(s, cached) for s in prefill), default=0)
        columns = min(self._budget(decode, prefill), longest)
        border = self.limits.checkpoint
        if border is None or columns == 0:
            return columns
        # Recurrent states are kept where a chunk ends: at multiples of this, and where a prompt
        # leaves the path of others, since more may come that share as much.
        begun = max(cached.get(s, s.computed) for s in prefill)
        parting = [s.shared - begun for s in prefill if s.shared >= begun + MIN_SHARED]
        return min(columns, border - begun % border, *parting)

    def _budget(self, decode: list[Sequence], prefill: list[Sequence]) -> int:
        """Prompt tokens that the step has room for; a row that joins needs one for its decode."""
        rows = len(decode) + sum(s.rows for s in prefill)
        return max(1, self.limits.max_step_tokens - rows)

    def _shares_a_chunk(self, decode: list[Sequence], group: Mapping[Sequence, int]) -> bool:
        if len(group) == 1:
            return True
        left = [_left(sequence, group) for sequence in group]
        columns = max(left) * len(group)
        padding = columns - sum(left)
        if not self.limits.geometry.pads and (padding or len(set(group.values())) > 1):
            return False
        if self._columns(decode, list(group), group) < max(left):
            return False  # a border cuts them short, and only one prompt takes several chunks
        room = self._budget(decode, list(group))
        return columns <= room and padding <= MAX_PREFILL_PADDING * columns

    def _capacity(
        self, decode: list[Sequence], prefill: list[Sequence], now: Capacity, spare: int = 0
    ) -> Capacity | None:
        """What the decode batch needs once ``prefill`` has joined; None if the bytes do not allow.

        Counted with what the prefill itself holds until then. ``spare`` columns more must fit, so
        that who is admitted is not preempted at once.
        """
        if not decode and not prefill:
            return NOTHING
        longest = max((s.wanted for s in prefill), default=0)
        rows = len(decode) + sum(s.rows for s in prefill)
        need = Capacity(rows, spare + max(longest, max((s.wanted for s in decode), default=0)))
        begun = Capacity(len(prefill), longest)
        return self.limits.choose(need, now, self.limits.prefill_bytes(begun))

    def check_integrity(self) -> None:
        """Asserts what must hold between two steps."""
        everyone = list(self)
        assert len(set(map(id, everyone))) == len(everyone)
        assert sum(s.wanted < s.most for s in self.running) <= self.limits.max_rows
        assert len(self.prefilling) <= 1
        for sequence in everyone:
            assert not sequence.finished
            assert 0 <= sequence.computed <= sequence.wanted <= sequence.most
        for sequence in self.running:
            assert sequence.forked
            assert sequence.computed == sequence.wanted - 1
        for sequence in self.waiting:
            assert sequence.computed == 0


def _left(sequence: Sequence, cached: Mapping[Sequence, int]) -> int:
    """Tokens to compute before a sequence can join, if it begins with those cached."""
    return sequence.to_prefill - cached.get(sequence, 0)


def _shared(one: Sequence, other: Sequence) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    most = min(len(one.tokens), len(other.tokens))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), most)
