"""Whether a prompt more fits: what rows and prompts take, counted once a step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

from chairlift.cache.capacity import COLUMN_STEP, Capacity
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence


class Room:
    """Finds the capacity of a decode batch that ``prefill`` will join, and others after them.

    A step looks at every row once, however many prompts it asks about.

    Args:
        arriving: prompts that are computed, whose state is yet to be copied into rows of
            ``decode``: what they hold is counted until it has been, as for ``prefill``.
        coming: those that will want a row soon, ``prefill`` or not.
        now: the capacity that the batch has.
    """

    def __init__(
        self,
        limits: Limits,
        decode: Seq[Sequence],
        prefill: Iterable[Sequence],
        arriving: Iterable[Sequence],
        coming: Iterable[Sequence],
        now: Capacity,
    ) -> None:
        coming = list(coming)
        wanted = [s.wanted for s in decode]
        # Rows of the batch once all have joined, and the tokens of those that are there already.
        self.rows = len(decode)
        self.context = sum(wanted)
        self._limits = limits
        self._now = now
        self._longest = max(wanted, default=0)
        self._ahead = self._columns_ahead(
            [s.most for s in chain(decode, coming)], [*wanted, *(s.wanted for s in coming)]
        )
        self._expected = min(limits.max_rows, self.rows + sum(s.rows for s in coming))
        self._prompt_bytes = sum(map(self._bytes_of, arriving))
        for sequence in prefill:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """A prompt is to be computed, and its choices to join the batch."""
        self.rows += sequence.rows
        self._longest = max(self._longest, sequence.wanted)
        self._ahead = max(self._ahead, self._columns_ahead([sequence.most], [sequence.wanted]))
        self._prompt_bytes += self._bytes_of(sequence)

    def capacity(self, more: Sequence | None = None) -> Capacity | None:
        """What the batch needs once all have joined, and ``more``; None if the bytes do not allow.

        Beside others ``more`` must leave a few columns to spare, so that who is admitted is not
        preempted at once.
        """
        if more is None and not self.rows:
            return Capacity(0, 0)
        if more is None:
            need = Capacity(self.rows, self._longest)
            ahead, prompt_bytes = self._ahead, self._prompt_bytes
        else:
            spare = COLUMN_STEP if self.rows else 0
            need = Capacity(self.rows + more.rows, max(self._longest, more.wanted) + spare)
            ahead = max(self._ahead, self._columns_ahead([more.most], [more.wanted]))
            prompt_bytes = self._prompt_bytes + self._bytes_of(more)
        hoped = Capacity(max(need.rows, self._expected), max(need.columns, ahead))
        return self._limits.choose(need, hoped, self._now, prompt_bytes)

    def _columns_ahead(self, most: Iterable[int], wanted: Iterable[int]) -> int:
        """The columns that the longest of these may be given."""
        ahead = self._limits.ahead
        return max(map(min, most, [tokens + ahead for tokens in wanted]), default=0)

    def _bytes_of(self, prompt: Sequence) -> int:
        return self._limits.prefill_bytes(Capacity(1, prompt.wanted))
