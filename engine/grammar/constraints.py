"""The constraints of all rows: followed, and made into masks, beside the device's work."""

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
    """A row's constraint after the tokens that it was told of, and what comes of that: the mask of
    the next token, ``[words]``; or that there is none, or what went wrong.
    """

    constraint: Constraint
    mask: Bits | None = None
    complete: bool = False
    error: Exception | None = None
    effort: Effort = field(default_factory=Effort)


class Constraints:
    """Of every sequence that has one, from when it first has a row to its end.

    ``join`` and ``advance`` begin work on a thread of its own; whatever tells of its outcome waits
    for it.

    Args:
        vocabulary: the last dimension of the logits.
        constraint: a sequence's, before the first token of its output; None: it has none.
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
        """Whether any of them has to wait for its last token before it can choose the next."""
        return bool(self._rows) and any(sequence in self._rows for sequence in rows)

    def join(self, sequences: Iterable[Sequence]) -> None:
        """These get a row, for the first time or again."""
        told: list[tuple[_Row, Seq[int]]] = []
        for sequence in sequences:
            if sequence not in self._rows and (constraint := self._constraint(sequence)):
                row = self._rows[sequence] = _Row(constraint)
                told.append((row, sequence.tokens[sequence.prompt_tokens :]))
        self._begin(told)

    def advance(self, tokens: Iterable[tuple[Sequence, int]]) -> None:
        """Each of these sequences, if it has a constraint, has got that token; a number below 0 is
        none, and its row is about to end.
        """
        own = [(s, token) for s, token in tokens if token >= 0 and s in self._rows]
        self._begin([(self._rows[s], [token]) for s, token in own])

    def masks(self, rows: Seq[Sequence]) -> Bits:
        """What each row's next token may be: ``[rows, words]``, see ``masks``."""
        self._settle()
        bits = free(len(rows), self._vocabulary)
        for number, sequence in enumerate(rows):
            row = self._rows.get(sequence)
            if row is not None and row.mask is not None:
                bits[number] = row.mask
        return bits

    def complete(self, sequence: Sequence) -> bool:
        """Whether nothing can follow the last token of a sequence.

        Raises:
            Exception: of any type; its constraint has failed.
        """
        row = self._rows.get(sequence)
        if row is None:
            return False
        self._settle()
        if row.error is not None:
            raise row.error
        return row.complete

    def drop(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._rows.pop(sequence, None)

    def _begin(self, told: Seq[tuple[_Row, Seq[int]]]) -> None:
        if told:
            self._work.append(self._thread.submit(self._follow, told))

    def _settle(self) -> None:
        """Waits for what has begun."""
        while self._work:
            self._work.pop(0).result()

    def _follow(self, told: Seq[tuple[_Row, Seq[int]]]) -> None:
        """Tells rows of their tokens, and makes their masks; on the thread."""
        going: list[_Row] = []
        for row, tokens in told:
            row.mask = None
            try:
                with row.effort.following(len(tokens)):
                    row.constraint.take(tokens)
                row.complete = row.constraint.complete
            except Exception as error:  # of any type: it is this row's alone
                row.error = error
            if row.error is None and not row.complete:
                going.append(row)
        bits = free(len(going), self._vocabulary)
        self._fill(going, bits)
        for row, mask in zip(going, bits, strict=True):
            try:
                row.mask = _completed(row.constraint, mask)
                row.effort.check()
            except Exception as error:
                row.error = error

    def _fill(self, rows: Seq[_Row], bits: Bits) -> None:
        """Sets in ``[rows, words]`` what fits each row's grammar.

        All at once, on several threads, which does not say whose mask takes long: when one does,
        the next ones are made alone, each of them measured.
        """
        together: list[tuple[LLMatcher, int]] = []
        for number, row in enumerate(rows):
            if (matcher := row.constraint.matcher) is None:
                continue
            if row.effort.suspect:
                with row.effort.alone():
                    fill_next_token_bitmask(matcher, bits, number)
            else:
                together.append((matcher, number))
        if not together:
            return
        self._executor = self._executor or LLExecutor()
        began = time.perf_counter()
        fill_next_token_bitmask_par(self._executor, together, bits)
        if time.perf_counter() - began > SUSPECT_SECONDS:
            for _, number in together:
                rows[number].effort.suspect = True


def _completed(constraint: Constraint, mask: Bits) -> Bits:
    """The mask with what the matcher knows nothing of."""
    if constraint.matcher is not None:
        check(constraint.matcher)
    constraint.shape(mask)
    if not mask.any():
        raise GrammarError("nothing may come next")
    return mask
