"""Chooses the prompts of one step: which begin, which continue, and with how many tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.chunks import Chunks
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import Sibling
from chairlift.scheduler.step_memory.memory_plan import MemoryPlan

# A plan passes over this many waiting sequences that cannot begin; this bounds its cost.
MAX_PASSED = 8


class StepPrompts:
    """Fills a step with chunks of prompts, in the order of their turns.

    Args:
        limits: the scheduler's limits.
        sizes: chooses the sizes of chunks.
        memory: the memory of the step, with its rows and the prompts that have begun.
        prefix: returns the number of cached tokens of a waiting sequence, or the sibling to wait
            for, given the prompts of the step.
        prefill: the prompts that have begun.
        capacities: the capacities of the bands without further prompts.
        rows: the work of the step without prompts.
        seconds: the time that the step may take.

    Attributes:
        chunks: the tokens of each prompt that the step computes.
        cached: the prompts that begin, and their cached tokens.
        followers: the waiting sequences that have a sibling to wait for.
        capacities: the capacities of the bands with all prompts.
        work: the work of the step.
    """

    def __init__(
        self,
        limits: Limits,
        sizes: Chunks,
        memory: MemoryPlan,
        prefix: Callable[[Sequence, list[Sequence]], int | Sibling],
        prefill: Iterable[Sequence],
        capacities: tuple[Capacity, ...],
        rows: Work,
        seconds: float,
    ) -> None:
        self._limits = limits
        self._sizes = sizes
        self._memory = memory
        self._prefix = prefix
        self._prefill = list(prefill)
        self._rows_only = rows
        self._seconds = seconds
        # Prompts that have begun and have no chunk in the step yet, by turn.
        self._begun = deque(sorted(self._prefill, key=lambda s: s.turn))
        self._passed, self._last_turn = 0, math.inf
        self.chunks: dict[Sequence, int] = {}
        self.cached: dict[Sequence, int] = {}
        self.followers: list[tuple[Sequence, Sibling]] = []
        self.capacities = capacities
        self.work = rows

    def fill(self, waiting: Iterable[Sequence]) -> None:
        """Adds chunks of the prompts that have begun, and begins those of ``waiting`` that fit."""
        for sequence in waiting:
            if self._passed == MAX_PASSED or sequence.turn[0] > self._last_turn:
                break
            while self._begun and self._begun[0].turn < sequence.turn:
                self._continue(self._begun.popleft())
            if not self._pass_or_begin(sequence):
                break
        for sequence in self._begun:
            self._continue(sequence)

    def _continue(self, sequence: Sequence) -> None:
        """Adds the next chunk of a prompt that has begun, if it fits the step."""
        begun = sequence.computed
        if tokens := self._sizes.size(sequence, begun, self.work, self._seconds):
            self._add_chunk(sequence, begun, tokens)

    def _pass_or_begin(self, sequence: Sequence) -> bool:
        """Begins a waiting sequence or passes over it; False if it and all others have to wait."""
        # Cheap checks first: the prefix cache is asked only about sequences that could begin.
        free = self._limits.max_rows - self._memory.rows
        if sequence.rows > free > 0:
            self._passed += 1
            self._last_turn = min(self._last_turn, sequence.turn[0] + self._limits.bypass)
            return True
        if sequence.rows > free or not self._may_fit(sequence):
            return False
        begin = self._prefix(sequence, self._prefill)
        if isinstance(begin, Sibling):
            self._passed += 1
            self.followers.append((sequence, begin))
            return True
        return self._begin(sequence, begin)

    def _may_fit(self, sequence: Sequence) -> bool:
        """Whether time and memory are left for any of a prompt's tokens."""
        if self._sizes.tokens_left(sequence, 0, self.work, self._seconds) < 1:
            return False
        if self._limits.paged:  # its pages depend on its prefix
            return True
        least = self._limits.memory.min_prompt_bytes(sequence.num_tokens)
        return self._memory.capacities(sequence, least) is not None

    def _begin(self, sequence: Sequence, cached: int) -> bool:
        """Begins a prompt after its cached tokens; False if it does not fit."""
        tokens = self._sizes.size(sequence, cached, self.work, self._seconds)
        if not tokens:
            return False
        cut = self._limits.avoid_partial_prefill and tokens < sequence.num_tokens - cached
        if cut and self._sizes.size(sequence, cached, self._rows_only, self._seconds) > tokens:
            return False
        prompt_bytes = self._limits.memory.prompt_bytes(sequence.num_tokens, cached)
        capacities = self._memory.capacities(sequence, prompt_bytes)
        if capacities is None:
            if not sequence.copies_page or self._memory.rows:
                return False
            # Alone it must fit: without its prefix, no page is copied.
            sequence.forget_prefix()
            return self._begin(sequence, 0)
        self.capacities = capacities
        self._memory.add(sequence, prompt_bytes)
        self._prefill.append(sequence)
        self.cached[sequence] = cached
        self._add_chunk(sequence, cached, tokens)
        return True

    def _add_chunk(self, sequence: Sequence, begun: int, tokens: int) -> None:
        self.chunks[sequence] = tokens
        self.work = self.work.with_chunk(begun, tokens, sequence.scored)
