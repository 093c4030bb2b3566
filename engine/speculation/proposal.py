"""Proposers: each looks for the next tokens of a sequence in another place."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from chairlift.engine.messages import Submit
from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.engine.speculation.lookup import Lookup, continued
from chairlift.scheduler.sequence import Sequence

# A prediction is compared with the output by matches of these lengths.
PREDICTION_MATCH = (2, 16)
# Tokens that are looked up in the prefix cache at once.
PREFIX_TOKENS = 256


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
        """At most ``count`` tokens that may follow the sequence's last one; None if it finds none.

        All tokens of the sequence are known, and were so far.
        """
        ...


class IndexedText:
    """A text that a request brings along, and its index, which the request's choices share."""

    def __init__(self, tokens: Seq[int], shortest: int, longest: int) -> None:
        self.tokens = tokens
        self.lookup = Lookup(shortest, longest)

    def extend(self) -> None:
        """Indexes the text, or the next part of it."""
        self.lookup.extend(self.tokens)


# The texts of all proposers, by the identity of their tokens and the lengths of matches.
_texts: WeakValueDictionary[tuple[int, int, int], IndexedText] = WeakValueDictionary()


def indexed(tokens: Seq[int], shortest: int, longest: int) -> IndexedText:
    """A text with its index; the same one as long as any proposer has it.

    Indexes for each of many choices would delay a step by seconds.
    """
    key = id(tokens), shortest, longest  # unique: a text keeps its tokens
    text = _texts.get(key)
    if text is None:
        text = _texts[key] = IndexedText(tokens, shortest, longest)
    return text


class NgramProposer:
    """Looks for the last tokens earlier in the sequence's own prompt and output.

    Args:
        prompt: the request's prompt, one list for all of its choices.
    """

    def __init__(self, shortest: int, longest: int, prompt: Seq[int]) -> None:
        self._prompt = indexed(prompt, shortest, longest)
        self._lookup = Lookup(shortest, longest, self._prompt.lookup, len(prompt))

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        tokens = sequence.tokens
        self._prompt.extend()
        self._lookup.extend(tokens)
        match = self._lookup.find(tokens, tokens[-self._lookup.longest :])
        if match is None:
            return None
        return Proposal(continued(tokens, match.place, count), f"ngram-{match.length}")


class PredictionProposer:
    """Follows a text that the client expects as the output.

    Where the output differs, it looks for the output's last tokens in the prediction.

    Args:
        prediction: the tokens of the text, one list for all choices of a request.
    """

    def __init__(self, prediction: Seq[int]) -> None:
        self._prediction = prediction
        self._text = indexed(prediction, *PREDICTION_MATCH)
        # The place in the prediction that comes next, after ``_read`` output tokens; None: unknown.
        self._place: int | None = 0
        self._read = 0

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        tokens, begin = sequence.tokens, sequence.prompt_tokens
        self._text.extend()
        self._follow(tokens[begin + self._read :])
        if self._place is None:
            last = tokens[max(begin, len(tokens) - PREDICTION_MATCH[1]) :]
            match = self._text.lookup.find(self._prediction, last)
            self._place = None if match is None else match.place
        if self._place is None or self._place >= len(self._prediction):
            return None
        return Proposal(list(self._prediction[self._place : self._place + count]), "prediction")

    def _follow(self, new: Seq[int]) -> None:
        """Moves the place by new output tokens, as long as they are the predicted ones."""
        self._read += len(new)
        if self._place is None:
            return
        stop = self._place + len(new)
        self._place = stop if list(self._prediction[self._place : stop]) == new else None


class Prefixes(Protocol):
    """The sequences of earlier requests, as far as they are kept."""

    @property
    def version(self) -> int:
        """Increases whenever ``continuation`` may give more."""
        ...

    def continuation(self, sequence: Sequence, count: int) -> list[int]:
        """At most ``count`` tokens that followed all of a sequence's tokens in an earlier one."""
        ...


class PrefixProposer:
    """Proposes what followed the same prompt and the same output in an earlier request.

    Args:
        prefixes: the prefix cache.
    """

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        # The tokens expected after the first ``_start`` ones, and the version of the prefix cache
        # that had none.
        self._expected: list[int] = []
        self._start = 0
        self._nothing_at = -1

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        done = len(sequence.tokens) - self._start
        if sequence.tokens[self._start :] != self._expected[:done]:
            self._expected, self._start, done = [], len(sequence.tokens), 0
        if len(self._expected) < done + count and self._prefixes.version != self._nothing_at:
            self._start, done = len(sequence.tokens), 0
            self._expected = self._prefixes.continuation(sequence, PREFIX_TOKENS)
            if len(self._expected) < count:
                self._nothing_at = self._prefixes.version
        tokens = self._expected[done : done + count]
        return Proposal(tokens, "prefix") if tokens else None


def proposers(request: Submit, config: SpeculativeConfig | None = None) -> list[Proposer]:
    """The proposers of a choice of a request, the best first.

    Args:
        config: None proposes only what the request brings along.
    """
    found: list[Proposer] = [PredictionProposer(request.prediction)] if request.prediction else []
    if config is not None and config.looks_up:
        found.append(NgramProposer(*config.match_lengths, request.prompt))
    return found
