"""How many tokens of each prompt a step computes: within its limits, and a time beside rows."""

from __future__ import annotations

import math

from chairlift.scheduler.cost import CostModel, Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import MIN_SHARED

# The fewest tokens of a first prompt that a step computes, however long that takes.
MIN_CHUNK = 32


class Chunks:
    """Sizes the chunks of a step, by how long earlier steps took."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cost = CostModel()
        # Learns from steps without prompts: other steps do not show what the rows alone would take.
        self._alone = CostModel()

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        self._cost.learn(work, seconds)
        if not work.tokens:
            self._alone.learn(work, seconds)

    def seconds(self, rows: Work) -> float:
        """How long a step may take beside these rows."""
        if not rows.rows:
            return math.inf
        return max(
            self._limits.step_seconds, self._limits.max_step_stretch * self._alone.seconds(rows)
        )

    def tokens_left(self, sequence: Sequence, begun: int, work: Work, seconds: float) -> float:
        """How many more tokens of a prompt, of which ``begun`` are computed, fit the step.

        The first prompt always gets a least number of tokens, however long they take.
        """
        most = self._most(sequence, work)
        room = min(most, self._cost.tokens_within(work, seconds, begun, sequence.scored))
        least = 0 if work.tokens else max(MIN_CHUNK, self._limits.chunk_multiple)
        return max(room, min(most, least))

    def size(self, sequence: Sequence, begun: int, work: Work, seconds: float) -> int:
        """How many tokens of a prompt, of which ``begun`` are computed, to add to a step's work."""
        room = self.tokens_left(sequence, begun, work, seconds)
        left = sequence.num_tokens - begun
        if room < left and not self._ends_anyway(left, room, self._most(sequence, work)):
            multiple = self._limits.chunk_multiple
            whole = int(room // multiple) * multiple
            left = min(left, whole if whole or work.tokens else int(room))
        border = self._limits.checkpoint
        if border is None:
            return left
        # Recurrent states are kept where a chunk ends: at multiples of this, and where a prompt
        # leaves the path of others, since more may come that share as much.
        parting = sequence.shared - begun
        ends = [border - begun % border, *([parting] if parting >= MIN_SHARED else [])]
        return min(left, *ends)

    def _most(self, sequence: Sequence, work: Work) -> int:
        """How many more tokens of a prompt the limits allow, whatever they take."""
        most = self._limits.max_step_tokens - work.rows - work.tokens
        return min(most, self._limits.max_scored - work.scored) if sequence.scored else most

    def _ends_anyway(self, left: int, room: float, most: int) -> bool:
        """Whether a prompt's last tokens go along although they take longer than they should: where
        another chunk costs launches, which take longer still.
        """
        limits = self._limits
        return (
            limits.avoid_partial_prefill
            and room >= 1
            and left <= min(room + limits.chunk_multiple, most)
        )
