"""The constraints of all rows: updated and turned into masks while the device works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.constraint import Constraint
from chairlift.engine.grammar.effort import SUSPECT_SECONDS, Effort
from chairlift.engine.grammar.language import check
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.sampling.masks import Bits, allows, free
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

_NOTHING = "nothing may come next"


@dataclass(slots=True, eq=False)
class _Row:
    """A row's constraint, and its result for the next token.

    Attributes:
        mask: ``[words]``, the allowed tokens; None if ``complete`` or ``error`` is set.
        ahead: the masks after each token of the row's draft; see ``Constraints.foresee``.
        complete: no further token can follow.
        error: why the constraint has failed.
        effort: the CPU time of the grammar.
    """

    constraint: Constraint
    mask: Bits | None = None
    ahead: list[Bits] = field(default_factory=list)
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
        # The masks that were made last, and their rows if none has failed.
        self._made: tuple[Seq[_Row], Bits] = (), free(0, vocabulary)

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

    def advance(self, outcomes: Iterable[tuple[Sequence, Seq[int]]]) -> None:
        """Feeds each sequence's new tokens to its constraint, if it has one.

        Negative outcomes, which are failure codes, are skipped.
        """
        constrained = [(self._rows[s], tokens) for s, tokens in outcomes if s in self._rows]
        updates = [(row, [token for token in tokens if token >= 0]) for row, tokens in constrained]
        self._begin([(row, tokens) for row, tokens in updates if tokens])

    def forced(self, sequence: Sequence) -> list[int]:
        """The next tokens of a sequence, if its grammar leaves only one way; else empty."""
        row = self._up_to_date(sequence)
        if row is None or row.mask is None or row.effort.suspect:
            return []
        with row.effort.following(0):
            return row.constraint.forced

    def foresee(self, sequence: Sequence, draft: Seq[int]) -> int:
        """How many first tokens of a draft the sequence's constraint allows before its end.

        Makes the masks that ``masks`` needs for this draft, or for its first tokens.
        """
        row = self._up_to_date(sequence)
        if row is None:
            return len(draft)
        row.ahead = []
        if row.mask is None or row.effort.suspect:
            return 0
        with row.effort.following(len(draft)), row.constraint.trying():
            try:
                self._look_ahead(row, row.mask, draft)
            except Exception as error:  # any error fails this row only, when it comes there
                log.debug("a constraint cannot look ahead: %s", redacted_traceback(error))
        return len(row.ahead)

    def _look_ahead(self, row: _Row, mask: Bits, draft: Seq[int]) -> None:
        """Adds the masks after the allowed first tokens of a draft to ``row.ahead``."""
        for token in draft:
            if not allows(mask, token):
                return
            row.constraint.take([token])
            if row.constraint.complete:
                return
            bits = free(1, self._vocabulary)
            if (matcher := row.constraint.matcher) is not None:
                fill_next_token_bitmask(matcher, bits, 0)
            mask = bits[0]
            _complete(row.constraint, mask)
            if not mask.any():
                raise GrammarError(_NOTHING)
            row.ahead.append(mask)

    def masks(self, rows: Seq[Sequence], drafts: Seq[Seq[int]] = ()) -> Bits:
        """The masks of each row's next token, and of those after each token of its draft.

        Args:
            drafts: each row's draft, which ``foresee`` has allowed; empty if no row has one.

        Returns:
            ``[tokens, words]``; see ``sampling.masks``.
        """
        self._wait()
        made, bits = self._made
        if not drafts and [*map(id, made)] == [id(self._rows.get(one)) for one in rows]:
            return bits
        bits = free(len(rows) + sum(map(len, drafts)), self._vocabulary)
        line = 0
        for number, sequence in enumerate(rows):
            length = len(drafts[number]) if drafts else 0
            row = self._rows.get(sequence)
            if row is not None and row.mask is not None:
                bits[line] = row.mask
                for i, mask in enumerate(row.ahead[:length], line + 1):
                    bits[i] = mask
            line += 1 + length
        return bits

    def _up_to_date(self, sequence: Sequence) -> _Row | None:
        """A sequence's constraint, up to date; None if it has none."""
        row = self._rows.get(sequence)
        if row is not None:
            self._wait()
        return row

    def complete(self, sequence: Sequence) -> bool:
        """Whether no token can follow a sequence's last one.

        Raises:
            Exception: of any type; the constraint has failed.
        """
        row = self._rows.get(sequence)
        if row is None:
            return False
        self._wait()
        if row.error is not None:
            raise row.error
        return row.complete

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended."""
        self._rows.pop(sequence, None)

    def _begin(self, updates: Seq[tuple[_Row, Seq[int]]]) -> None:
        if updates:
            self._work.append(self._thread.submit(self._follow, updates))

    def _wait(self) -> None:
        """Waits for all started work."""
        while self._work:
            self._work.pop(0).result()

    def _follow(self, updates: Seq[tuple[_Row, Seq[int]]]) -> None:
        """Feeds tokens to rows and makes their masks; runs on the thread."""
        unfinished: list[_Row] = []
        for row, tokens in updates:
            row.mask, row.ahead = None, []
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
                _complete(row.constraint, mask)
                row.effort.check()
                row.mask = mask
            except Exception as error:
                row.error = error
        for number in np.flatnonzero(~bits.any(axis=1)).tolist():
            row = unfinished[number]
            row.mask, row.error = None, row.error or GrammarError(_NOTHING)
        sound = all(row.error is None for row in unfinished)
        self._made = (unfinished, bits) if sound else ((), bits)

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


def _complete(constraint: Constraint, mask: Bits) -> None:
    """Checks the matcher that has filled a mask, and applies the thought to the mask."""
    if (matcher := constraint.matcher) is not None:
        check(matcher)
    constraint.apply_thought(mask)
