"""Proposers: each looks for the next tokens of a sequence in another place."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from chairlift.engine.messages import Submit
from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.engine.speculation.lookup import Lookup, continued
from chairlift.scheduler.sequence import Sequence

# A prediction is compared with the output by matches of these lengths.
PREDICTION_MATCH = (2, 16)


class Proposal(NamedTuple):
    """Proposed next tokens, at least one.

    Attributes:
        source: proposals of the same source are about equally often right.
    """

    tokens: list[int]
    source: str


class Proposer(Protocol):
    """Proposes the next tokens of one sequence."""

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        """At most ``count`` tokens that may follow the sequence's last token; None: no idea.

        All tokens of the sequence are known, and were so far.
        """
        ...


class NgramProposer:
    """Looks for the last tokens earlier in the sequence's own prompt and output."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lookup = Lookup(shortest, longest)

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        tokens = sequence.tokens
        self._lookup.extend(tokens)
        match = self._lookup.find(tokens, tokens[-self._lookup.longest :])
        if match is None:
            return None
        return Proposal(continued(tokens, match.place, count), f"ngram-{match.length}")


class PredictionProposer:
    """Follows a text that the client expects as the output.

    Where the output differs, it looks for the output's last tokens in the prediction.

    Args:
        prediction: the tokens of the text.
    """

    def __init__(self, prediction: Seq[int]) -> None:
        self._prediction = prediction
        self._lookup = Lookup(*PREDICTION_MATCH)
        self._lookup.extend(prediction)
        # The place in the prediction that comes next, after ``_read`` output tokens; None: unknown.
        self._place: int | None = 0
        self._read = 0

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        output = sequence.tokens[sequence.prompt_tokens :]
        self._follow(output)
        if self._place is None:
            match = self._lookup.find(self._prediction, output[-self._lookup.longest :])
            self._place = None if match is None else match.place
        if self._place is None or self._place >= len(self._prediction):
            return None
        tokens = list(self._prediction[self._place : self._place + count])
        return Proposal(tokens, "prediction")

    def _follow(self, output: Seq[int]) -> None:
        """Moves the place by the output's new tokens, as long as they are the predicted ones."""
        new = output[self._read :]
        self._read = len(output)
        if self._place is None:
            return
        stop = self._place + len(new)
        self._place = stop if list(self._prediction[self._place : stop]) == new else None


def proposers(request: Submit, config: SpeculativeConfig | None = None) -> list[Proposer]:
    """The proposers of a request, the best first.

    Args:
        config: None proposes only what the request brings along.
    """
    found: list[Proposer] = [PredictionProposer(request.prediction)] if request.prediction else []
    if config is not None and config.method == "ngram":
        found.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    return found
