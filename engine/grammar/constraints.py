"""The constraints of all rows: updated and turned into masks while the device works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.constraint import Constraint
from chairlift.engine.grammar.effort import SUSPECT_SECONDS, Effort
from chairlift.engine.grammar.language import check
from chairlift.engine.sampling.masks import Bits, free
from chairlift.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Row:
    """A row's constraint, and its result for the next token.

    Attributes:
        mask: ``[words]``, the allowed tokens; None if ``complete`` or ``error`` is set.
        complete: no further token can follow.
        error: why the constraint has failed.
        effort: the CPU time of the grammar.
    """

    constraint: Constraint
    mask: Bits | None = None
    complete: bool = False
    error: Exception | None = None
    effort: Effort = field(default_factory=Effort)


class Constraints:
    """The constraints of all sequences that have one, from their first row to their end.

    ``join`` and ``advance`` start work on a separate thread; ``masks`` and ``complete`` wait for
    it.

    Args:
        vocabulary: the last dimension of the logits.
        constraint: makes a sequence's constraint before its first output token; None if it has
            none.
    """

    def __init__(
        self, vocabulary: int, constraint: Callable[[Sequence], Constraint | None]
    ) -> None:
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._rows: dict[Sequence, _Row] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chairlift-masks")
        self._work: list[Future[None]] = []
        self._executor: LLExecutor | None = None

    def constrains(self, rows: Iterable[Sequence]) -> bool:
        """Whether any of the rows is constrained, so that its last token is needed for its mask."""
        return bool(self._rows) and any(sequence in self._rows for sequence in rows)

    def join(self, sequences: Iterable[Sequence]) -> None:
        """Adds sequences that get a row, for the first time or again."""
        updates: list[tuple[_Row, Seq[int]]] = []
        for sequence in sequences:
            if sequence not in self._rows and (constraint := self._constraint(sequence)):
                row = self._rows[sequence] = _Row(constraint)
                updates.append((row, sequence.tokens[sequence.prompt_tokens :]))
        self._begin(updates)

    def advance(self, tokens: Iterable[tuple[Sequence, int]]) -> None:
        """Feeds each sequence's new token to its constraint, if it has one.

        Negative tokens, which are failure codes, are skipped.
        """
        constrained = [(s, token) for s, token in tokens if token >= 0 and s in self._rows]
        self._begin([(self._rows[s], [token]) for s, token in constrained])

    def masks(self, rows: Seq[Sequence]) -> Bits:
        """The masks of each row's next token, ``[rows, words]``; see ``sampling.masks``."""
        self._settle()
        bits = free(len(rows), self._vocabulary)
        for number, sequence in enumerate(rows):
            row = self._rows.get(sequence)
            if row is not None and row.mask is not None:
                bits[number] = row.mask
        return bits

    def complete(self, sequence: Sequence) -> bool:
        """Whether no token can follow a sequence's last one.

        Raises:
            Exception: of any type; the constraint has failed.
        """
        row = self._rows.get(sequence)
        if row is None:
            return False
        self._settle()
        if row.error is not None:
            raise row.error
        return row.complete

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended."""
        self._rows.pop(sequence, None)

    def _begin(self, updates: Seq[tuple[_Row, Seq[int]]]) -> None:
        if updates:
            self._work.append(self._thread.submit(self._follow, updates))

    def _settle(self) -> None:
        """Waits for all started work."""
        while self._work:
            self._work.pop(0).result()

    def _follow(self, updates: Seq[tuple[_Row, Seq[int]]]) -> None:
        """Feeds tokens to rows and makes their masks; runs on the thread."""
        unfinished: list[_Row] = []
        for row, tokens in updates:
            row.mask = None
            try:
                with row.effort.following(len(tokens)):
                    row.constraint.take(tokens)
                row.complete = row.constraint.complete
            except Exception as error:  # any error fails this row only
                row.error = error
            if row.error is None and not row.complete:
                unfinished.append(row)
        bits = free(len(unfinished), self._vocabulary)
        self._fill(unfinished, bits)
        for row, mask in zip(unfinished, bits, strict=True):
            try:
                row.mask = _completed(row.constraint, mask)
                row.effort.check()
            except Exception as error:
                row.error = error

    def _fill(self, rows: Seq[_Row], bits: Bits) -> None:
        """Fills ``[rows, words]`` with the tokens that each row's grammar allows.

        All masks are made together on several threads, which does not show which of them is slow.
        If the batch is slow, the next mask of each of its rows is made alone and measured.
        """
        batch: list[tuple[LLMatcher, int]] = []
        for number, row in enumerate(rows):
            if (matcher := row.constraint.matcher) is None:
                continue
            if row.effort.suspect:
                with row.effort.alone():
                    fill_next_token_bitmask(matcher, bits, number)
            else:
                batch.append((matcher, number))
        if not batch:
            return
        self._executor = self._executor or LLExecutor()
        began = time.perf_counter()
        fill_next_token_bitmask_par(self._executor, batch, bits)
        if time.perf_counter() - began > SUSPECT_SECONDS:
            for _, number in batch:
                rows[number].effort.suspect = True


def _completed(constraint: Constraint, mask: Bits) -> Bits:
    """The mask after checking the matcher and applying the thought."""
    if constraint.matcher is not None:
        check(constraint.matcher)
    constraint.shape(mask)
    if not mask.any():
        raise GrammarError("nothing may come next")
    return mask
