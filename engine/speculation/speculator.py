"""Decides when tokens are proposed, and by which proposer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.messages import Submit
from chairlift.engine.speculation.acceptance import Acceptance, Rate
from chairlift.engine.speculation.draft_model import Drafter
from chairlift.engine.speculation.proposal import Proposal, Proposer
from chairlift.scheduler.drafts import Chosen, Draft, Drafts
from chairlift.scheduler.sequence import Sequence

# While no draft is worth its cost, proposals are made in every second, fourth, ... step, at last in
# every one of so many, or of a quarter as many as there are rows: proposing takes time for each.
MAX_PERIOD = 16
# Rows' proposals of which no draft is chosen, before that.
PATIENCE = 8
# At most MAX_PROPOSED tokens are proposed for all rows together, or MIN_LENGTH for each: from there
# on, the time of a step grows with each token.
MAX_PROPOSED, MIN_LENGTH = 256, 8
_DRAFT_MODEL = "draft model"


@dataclass(slots=True)
class _Row:
    """A sequence's proposers, the best first, and its last proposal.

    Attributes:
        proposed: the last proposal.
        position: the number of the sequence's tokens at that time.
        rate: how often its proposals were right.
    """

    proposers: list[Proposer]
    proposed: Proposal | None = None
    position: int = 0
    rate: Rate = field(default_factory=Rate)


class Speculator:
    """Proposes drafts for running sequences.

    A draft has to follow the last token of its sequence, so a step with drafts is planned only when
    the step before has been read. Where the model computes while its graph is built, that costs
    nothing; otherwise the device waits for the host. Then the engine waits only if proposals for
    tokens that are one step old were worth it.

    Args:
        proposers: makes the proposers of a request, the best first.
        drafter: proposes for the sequences for which these have nothing; None: no draft model.
        waits: reading each step before the next is planned costs nothing.
        tokens: maximum tokens of a draft; 0 proposes none.
        constraints: those of the sequences.
        request_of: the request of a sequence.
    """

    def __init__(
        self,
        proposers: Callable[[Submit], list[Proposer]],
        waits: bool,
        tokens: int,
        constraints: Constraints,
        request_of: Callable[[Sequence], Submit],
        drafter: Drafter | None = None,
    ) -> None:
        self._proposers = proposers
        self._waits = waits and tokens > 0
        self._tokens = tokens
        self._constraints = constraints
        self._request_of = request_of
        self._drafter = drafter
        self._acceptance = Acceptance()
        self._rows: dict[Sequence, _Row] = {}
        # Proposals that are not yet compared with the tokens that came.
        self._unseen: list[tuple[Proposal, _Row, list[int]]] = []
        # Steps until the next proposals, and how many proposals since the last chosen draft.
        self._pause = self._unchosen = 0
        # Whether the last proposals were worth verifying.
        self._promising = False

    def due(self, rows: int, drafted: bool) -> bool:
        """Whether the running step has to be read before the next is planned.

        Args:
            rows: sequences that generate tokens.
            drafted: whether any of them has a draft in the running step.
        """
        return drafted or (rows > 0 and (self._promising or (self._waits and self._turn())))

    def drafts(self, sequences: Iterable[Sequence], choose: Callable[[Drafts], Chosen]) -> Chosen:
        """Proposes tokens for sequences all of whose tokens are known, and chooses from them."""
        sequences = list(sequences)
        drafts = self._propose(sequences)
        if self._drafter is not None:
            drafts |= self._drafted(self._drafter, sequences, drafts, choose)
        return self._decided(choose(drafts))

    def probe(self, sequences: Iterable[Sequence], choose: Callable[[Drafts], Chosen]) -> None:
        """Finds out whether drafts would be worth reading the running step first."""
        if self._tokens and not (self._waits or self._promising) and self._turn():
            sequences = list(sequences)
            drafts = self._propose(sequences)
            if self._drafter is not None:
                drafts |= self._guesses(sequences, drafts)
            self._decided(choose(drafts))

    def observe(self) -> None:
        """Compares the last proposals with the tokens that came, before the next are made.

        Call it after a launch, so that the device does not wait for it.
        """
        for proposed, row, real in self._unseen:
            self._acceptance.observe(proposed.source, row.rate, proposed.tokens, real)
        self._unseen = []

    def _decided(self, chosen: Chosen) -> Chosen:
        """Remembers whether any draft was chosen."""
        self._promising = bool(chosen)
        self._unchosen = 0 if chosen else self._unchosen + 1
        rows = max(1, len(self._rows))
        if (excess := self._unchosen - PATIENCE // rows) > 0:
            longest = max(MAX_PERIOD, rows // 4)
            self._pause = longest if excess > longest.bit_length() else min(1 << excess, longest)
        return chosen

    def _turn(self) -> bool:
        """Counts a step, and returns whether proposals are made in it."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def _drafted(
        self,
        drafter: Drafter,
        sequences: Seq[Sequence],
        drafts: Drafts,
        choose: Callable[[Drafts], Chosen],
    ) -> dict[Sequence, Draft]:
        """Drafts of the draft model, as long as they would be chosen.

        The time that it takes is part of a step with drafts, so the choice takes it into account.
        """
        drafter.keep(sequences)
        guesses = self._guesses(sequences, drafts)
        chosen = choose({**drafts, **guesses})
        wanted = {s: len(chosen[s]) for s in guesses if s in chosen}
        found: dict[Sequence, Draft] = {}
        for sequence, tokens in drafter.propose(wanted).items():
            row = self._rows[sequence]
            if allowed := self._constraints.foresee(sequence, tokens):
                row.proposed = Proposal(tokens[:allowed], _DRAFT_MODEL)
                found[sequence] = self._draft(*row.proposed, row)
        return found

    def _guesses(self, sequences: Iterable[Sequence], drafts: Drafts) -> dict[Sequence, Draft]:
        """Drafts as the draft model may propose them, with arbitrary tokens."""
        length = self._longest(len(self._rows))
        return {
            s: self._draft([0] * length, _DRAFT_MODEL, self._rows[s])
            for s in sequences
            if s not in drafts
        }

    def _draft(self, tokens: list[int], source: str, row: _Row) -> Draft:
        chance = self._acceptance.chance(source, row.rate)
        return Draft(tokens, list(accumulate(repeat(chance, len(tokens)), mul)))

    def _propose(self, sequences: Seq[Sequence]) -> dict[Sequence, Draft]:
        self.observe()
        length = self._longest(len(sequences))
        known, self._rows = self._rows, {}
        drafts: dict[Sequence, Draft] = {}
        for sequence in sequences:
            row = known.get(sequence) or _Row(self._proposers(self._request_of(sequence)))
            self._rows[sequence] = row
            if row.proposed is not None:
                self._unseen.append((row.proposed, row, sequence.tokens[row.position :]))
            row.proposed = self._proposal(sequence, row, length)
            row.position = len(sequence.tokens)
            if row.proposed is not None:
                drafts[sequence] = self._draft(*row.proposed, row)
        return drafts

    def _longest(self, rows: int) -> int:
        """The maximum tokens of a draft beside as many rows."""
        return min(self._tokens, max(MIN_LENGTH, MAX_PROPOSED // max(1, rows)))

    def _proposal(self, sequence: Sequence, row: _Row, length: int) -> Proposal | None:
        """The first proposal of which the sequence's grammar allows any token."""
        if forced := self._constraints.forced(sequence)[:length]:
            proposals: Iterable[Proposal | None] = [Proposal(forced, "forced")]
        else:
            proposals = (proposer.propose(sequence, length) for proposer in row.proposers)
        for proposal in proposals:
            if proposal is not None:
                allowed = self._constraints.foresee(sequence, proposal.tokens)
                if allowed == len(proposal.tokens):
                    return proposal
                if allowed:
                    return Proposal(proposal.tokens[:allowed], proposal.source)
        return None
