"""Chooses how many tokens of each prompt a step computes, by its limits and predicted time."""

from __future__ import annotations

import math

from chairlift.cache.pages.page import step_size, step_size_below
from chairlift.scheduler.cost import CostModel, Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.siblings import MIN_SHARED
from chairlift.scheduler.step_times import StepTimes

# A step computes at least this many tokens of its first prompt, however long that takes.
MIN_CHUNK = 32
# A prompt beside running rows should take at most LONG_PROMPT_STEPS steps. For that, a step may
# take up to LONG_PROMPT_STRETCH times its time limit. Otherwise a long prompt would take hundreds
# of steps, each of which reads the KV of all rows.
LONG_PROMPT_STEPS, LONG_PROMPT_STRETCH = 50, 2.0


class Chunks:
    """Chooses the sizes of prompt chunks; learns from earlier steps how long chunks take.

    Attributes:
        cost: predicts the time of any step.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._min_tokens = max(MIN_CHUNK, limits.chunk_multiple)
        self.cost = CostModel()
        # Steps without prompts: other steps do not show the time of the rows. The shortest count,
        # because a step that follows longer ones often takes longer itself.
        self._rows_only = StepTimes(min)

    def learn(self, work: Work, seconds: float) -> None:
        """Learns from a finished step how long such work takes."""
        self.cost.learn(work, seconds)
        self._rows_only.learn(work, seconds)

    def prefill_seconds(self, sequence: Sequence, begun: int) -> float:
        """The predicted seconds of a prompt after its first ``begun`` tokens; 0 before any step."""
        left = sequence.num_tokens - begun
        return self.cost.seconds(Work().with_chunk(begun, left, sequence.scored))

    def needs_rows_alone(self, rows: int) -> bool:
        """Whether a step of so many rows should have no prompts, to measure how long it takes.

        Otherwise, while many prompts wait, no step would show that; see ``seconds``.
        """
        limits = self._limits
        stretches = limits.max_step_stretch > 0 and limits.step_seconds < math.inf
        return rows > 0 and stretches and self._rows_only.any_plain(rows) is None

    def seconds(self, rows: Work, prompt: Sequence) -> float:
        """The maximum seconds of a step with these rows; infinite without rows.

        Args:
            rows: the work of the step without prompts.
            prompt: the next one to be computed.
        """
        if not rows.rows:
            return math.inf
        limit, stretch = self._limits.step_seconds, self._limits.max_step_stretch
        if not stretch or limit == math.inf:
            return limit
        measured = self._rows_only.any_plain(rows.rows)
        if measured is None:
            return limit  # a guess of how long so many rows take could be wrong by any factor
        # The time of the rows as measured, unless contexts have grown since: longer contexts came
        # with more rows, so their cost seems too high. The fit is too high for more rows than most
        # steps have.
        fitted = self.cost.seconds(rows)
        alone = min(measured, fitted)
        # If even one prompt token makes a step much longer (``first``), prompts get twice that
        # time. Otherwise few tokens would fit, and all of many steps would be that much longer.
        first = max(0.0, self.cost.seconds(rows.with_chunk(0, 1)) - fitted)
        begun = prompt.cached or 0
        left = prompt.num_tokens - begun
        whole = self.cost.seconds(rows.with_chunk(begun, left, prompt.scored)) - fitted
        share = min(alone + whole / LONG_PROMPT_STEPS, LONG_PROMPT_STRETCH * limit)
        return max(limit, stretch * alone, alone + 2 * first, share)

    def least(self, sequence: Sequence) -> int:
        """The tokens that a prompt needs of the next step so that it advances."""
        left = sequence.num_tokens - sequence.computed
        uncut = [len(run) for run in sequence.uncut if run.stop > sequence.computed]
        return max([min(left, self._min_tokens), *uncut])

    def tokens_left(self, sequence: Sequence, begun: int, work: Work, seconds: float) -> float:
        """Returns how many more tokens of a prompt fit the step.

        The first prompt of a step always gets a minimum, however long that takes.

        Args:
            sequence: the prompt.
            begun: its tokens that are computed or cached.
            work: the work of the step so far.
            seconds: the time that the step may take.
        """
        max_tokens = self._max_tokens(sequence, work)
        fitting = min(max_tokens, self.cost.tokens_within(work, seconds, begun, sequence.scored))
        min_tokens = 0 if work.tokens else self._min_tokens
        return max(fitting, min(max_tokens, min_tokens))

    def size(self, sequence: Sequence, begun: int, work: Work, seconds: float) -> int:
        """The size of a prompt's next chunk; 0 if none fits. Arguments as ``tokens_left``."""
        fitting = self.tokens_left(sequence, begun, work, seconds)
        size = sequence.num_tokens - begun
        if self._exceeds(size, fitting, work) and not self._finish_anyway(
            size, fitting, self._max_tokens(sequence, work)
        ):
            size = min(size, self._cut(int(fitting), work))
            size = _uncut(sequence, begun, size, self._max_tokens(sequence, work))
        checkpoint = self._limits.checkpoint
        if checkpoint is None:
            return size
        # Recurrent states can be saved only where a chunk ends: at multiples of ``checkpoint``, and
        # where the prefix ends that other prompts share, since more such prompts may come.
        until_parting = sequence.shared - begun
        ends = [checkpoint - begun % checkpoint]
        if until_parting >= MIN_SHARED:
            ends.append(until_parting)
        return min(size, *ends)

    def _exceeds(self, size: int, fitting: float, work: Work) -> bool:
        """Whether a chunk is too long, of which ``fitting`` tokens fit.

        Over pages a further prompt also has to fit with the step's padding.
        """
        padded = size
        if self._limits.paged and work.tokens:
            before = _computed(work)
            padded = step_size(before + size) - before
        return padded > fitting

    def _cut(self, fitting: int, work: Work) -> int:
        """The size of a chunk that does not end its prompt, of which ``fitting`` tokens fit.

        A step over pages then needs no padding; a step over columns, few different shapes.
        """
        if self._limits.paged:
            before = _computed(work)
            rounded = max(0, step_size_below(before + fitting) - before)
        else:
            multiple = self._limits.chunk_multiple
            rounded = fitting // multiple * multiple
        return rounded if rounded or work.tokens else fitting

    def _max_tokens(self, sequence: Sequence, work: Work) -> int:
        """The maximum tokens that the limits allow to add of a prompt, regardless of time."""
        max_tokens = self._limits.max_step_tokens - work.rows - work.drafts - work.tokens
        if sequence.scored:
            return min(max_tokens, self._limits.max_scored - work.scored)
        return max_tokens

    def _finish_anyway(self, left: int, fitting: float, max_tokens: int) -> bool:
        """Whether to finish a prompt although its last tokens exceed the step's time a little.

        With ``avoid_partial_prefill`` another chunk would cost launches that take even longer.
        """
        limits = self._limits
        return (
            limits.avoid_partial_prefill
            and fitting >= 1
            and left <= min(fitting + limits.chunk_multiple, max_tokens)
        )


def _uncut(sequence: Sequence, begun: int, size: int, max_tokens: int) -> int:
    """The size of a chunk that cuts none of ``sequence.uncut``; 0 if it would be too long."""
    for tokens in sequence.uncut:
        if tokens.start < begun + size < tokens.stop:
            if begun < tokens.start:
                return tokens.start - begun
            return tokens.stop - begun if tokens.stop - begun <= max_tokens else 0
    return size


def _computed(work: Work) -> int:
    """The tokens that a step over pages computes so far."""
    return work.rows + work.drafts + work.tokens
