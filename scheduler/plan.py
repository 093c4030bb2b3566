"""The plan of a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from chairlift.cache.capacity import Capacity
from chairlift.scheduler.cost import Work
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.bands import ONE_BAND, Bands

NO_CAPACITY = Capacity(0, 0)
NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step.

    Attributes:
        chunks: the prompts that are prefilled, and the number of tokens of each.
        cached: the sequences that begin, and how many of their first tokens need not be computed,
            because the prefix cache or a swapped state has them.
        decode: the rows that gain a token, and the band that each is in, or moves to.
        joins: the choices whose prompt ends with its chunk, and the sequence whose state each
            starts from. They gain their first token in this step and join the batch in the next.
        ends: the same for choices that end with their prompt and never have a row.
        preempted: sequences that leave the batch and wait again.
        leaves: sequences that had a row in the step before and have none in this one: they are
            finished, preempted, or have all their tokens in flight.
        drafts: proposed tokens of some rows of ``decode``, which the step verifies.
        capacities: the capacity of each band's buffers.
        bands: the bands, with the numbers of columns that belong to each.
        work: the step's work, from which its time is predicted.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    cached: Mapping[Sequence, int] = field(default_factory=dict)
    decode: dict[Sequence, int] = field(default_factory=dict)
    joins: dict[Sequence, Sequence] = field(default_factory=dict)
    ends: dict[Sequence, Sequence] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    leaves: list[Sequence] = field(default_factory=list)
    drafts: Mapping[Sequence, Seq[int]] = field(default_factory=dict)
    capacities: tuple[Capacity, ...] = (NO_CAPACITY,)
    bands: Bands = ONE_BAND
    work: Work = NO_WORK

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens this step computes."""
        return sum(self.chunks.values())
