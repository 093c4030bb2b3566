"""Adds up the memory of one step: its interface, and the choice between columns and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.bands import Bands
from chairlift.scheduler.step_memory.capacity_planner import CapacityPlanner
from chairlift.scheduler.step_memory.page_planner import PagePlanner


class MemoryPlan(Protocol):
    """Adds up what the rows and prompts of a step take, and answers whether one more prompt fits.

    Attributes:
        rows: rows of the batch once all prompts have joined.
        context: tokens of the rows that decode in this step.
        bands: the bands of this step.
        places: the band of each row that decodes in this step.
        moved: bytes of the rows that change their band; without ``moves`` none do.
    """

    rows: int
    context: int
    bands: Bands
    places: dict[Sequence, int]
    moved: int

    def add(self, sequence: Sequence, prompt_bytes: int) -> None:
        """Reserves the memory of a prompt, and rows for its choices."""

    def capacities(
        self, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        """The capacities of the bands; None if memory is too small.

        Next to other rows ``more`` must leave a little to spare, so that an admitted prompt is not
        preempted at once.

        Args:
            more: one more prompt to check.
            prompt_bytes: ``Memory.prompt_bytes`` of that prompt, or a lower bound.
        """


def plan_memory(
    limits: Limits,
    decode: Seq[Sequence],
    prefill: Iterable[Sequence],
    joining: Mapping[Sequence, Sequence],
    upcoming: Iterable[Sequence],
    now: Seq[Capacity],
    bands: Bands,
    moves: int,
    drafted: int = 0,
) -> MemoryPlan:
    """The plan of a step by the kind of memory that ``limits`` have. See ``CapacityPlanner``."""
    if limits.paged:
        return PagePlanner(limits, decode, prefill, now, drafted)
    return CapacityPlanner(limits, decode, prefill, joining, upcoming, now, bands, moves, drafted)
