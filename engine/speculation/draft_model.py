"""Proposes tokens with a smaller model of the same vocabulary, for all rows at once.

The draft model has caches of its own, a row for each sequence. Before it proposes, it computes the
tokens that the sequence has gained in the meantime, and takes back its own that were wrong. It
draws with the sequence's seed at each position, so that similar models draw the same token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import msgspec

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import COLUMN_STEP, Capacity, bucket, resized, row_bucket
from chairlift.engine.messages import SamplingParams
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.forward import Forward
from chairlift.engine.sampling.sampler import Sampler, SamplerRow
from chairlift.scheduler.sequence import Sequence

# Tokens of prompts that the draft model computes in one step, so that other rows do not wait long.
MAX_CATCH_UP = 256


class Drafter(Protocol):
    """Proposes the next tokens of many sequences together."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Proposes so many tokens for each sequence, all of whose tokens are known.

        Sequences for which it has no proposal yet are missing in the result.
        """
        ...

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Forgets all other sequences."""
        ...


@dataclass(slots=True)
class _Row:
    """A row of the draft model's cache.

    Attributes:
        fed: the tokens that it has computed.
        confirmed: how many of them, the first ones, were the sequence's at the last proposal.
    """

    fed: list[int] = field(default_factory=list)
    confirmed: int = 0

    def right(self, tokens: Seq[int]) -> int:
        """How many of the computed tokens are the sequence's; its last token never counts."""
        count = self.confirmed
        most = min(len(self.fed), len(tokens) - 1)
        while count < most and self.fed[count] == tokens[count]:
            count += 1
        return count


class DraftModel:
    """Implements ``Drafter``.

    Args:
        forward: calls the model.
        make_cache: makes an empty cache of columns for it; without recurrent states.
        vocabulary: token ids of both models are below it.
        params_of: how a sequence is sampled.
        max_tokens: rows times columns of the cache, at most. Sequences for which it has no room get
            no proposals, the longest first.
        max_context: longer sequences get no proposals; None: any do.
    """

    def __init__(
        self,
        forward: Forward,
        make_cache: Callable[[], BatchCache],
        vocabulary: int,
        params_of: Callable[[Sequence], SamplingParams],
        max_tokens: int,
        max_context: int | None = None,
    ) -> None:
        self._forward = forward
        self._cache = make_cache()
        self._max_tokens = max_tokens
        self._max_context = math.inf if max_context is None else max_context
        self._vocabulary = vocabulary
        self._params_of = params_of
        # In the order of the cache's rows.
        self._rows: dict[Sequence, _Row] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """See ``Drafter``."""
        for sequence in wanted:
            self._take_back(sequence)
        wanted = self._make_room(wanted)
        for sequence in wanted:
            if sequence not in self._rows:
                self._cache.join()
                self._rows[sequence] = _Row()
        feeds = self._missing(wanted)
        logits = self._feed(feeds)
        ready = [s for s in wanted if len(self._rows[s].fed) == len(s.tokens)]
        proposed: dict[Sequence, list[int]] = {s: [] for s in ready}
        while active := [s for s in ready if len(proposed[s]) < wanted[s]]:
            for sequence, token in zip(active, self._draw(active, proposed, logits), strict=True):
                proposed[sequence].append(token)
            feeds = {s: proposed[s][-1:] for s in active if len(proposed[s]) < wanted[s]}
            logits = self._feed(feeds)
        return proposed

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """See ``Drafter``."""
        kept = set(sequences)
        self._leave([s for s in self._rows if s not in kept])

    def _take_back(self, sequence: Sequence) -> None:
        """Takes back a row's tokens that are not the sequence's; the row leaves if it cannot."""
        row = self._rows.get(sequence)
        if row is not None:
            right = row.right(sequence.tokens)
            if self._cache.rewind(list(self._rows).index(sequence), right):
                row.fed, row.confirmed = row.fed[:right], right
            else:
                self._leave([sequence])

    def _make_room(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Makes the cache as large as the next steps need, or as it may be.

        Returns:
            The sequences for which there is room. Rows for which there is none leave.
        """
        lengths = {s: len(s.tokens) for s in sorted(wanted, key=lambda s: len(s.tokens))}
        lengths |= {s: len(row.fed) for s, row in self._rows.items() if s not in wanted}
        ahead = max(wanted.values(), default=1)
        kept: set[Sequence] = set()
        need = Capacity(0, 0)
        for sequence, length in lengths.items():
            columns = max(need.columns, bucket(length + ahead, COLUMN_STEP))
            larger = Capacity(row_bucket(len(kept) + 1), columns)
            if length + ahead <= self._max_context and math.prod(larger) <= self._max_tokens:
                need = larger
                kept.add(sequence)
        self.keep(kept)
        capacity = resized(need, self._cache.capacity)
        if math.prod(capacity) > self._max_tokens:
            capacity = need
        if not kept:
            self._cache.reset()
        elif capacity != self._cache.capacity:
            self._cache.resize(capacity)
        return {s: count for s, count in wanted.items() if s in kept}

    def _leave(self, sequences: Seq[Sequence]) -> None:
        numbers = {sequence: row for row, sequence in enumerate(self._rows)}
        order = self._cache.leave({numbers[sequence] for sequence in sequences})
        mx.eval(self._cache.take_moves())
        rows = list(self._rows.items())
        self._rows = dict(rows[row] for row in order)

    def _missing(self, wanted: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """The next tokens of each sequence that its row has to compute, as many as one step may."""
        left = MAX_CATCH_UP
        # Each row takes as many columns as the row with the most new tokens.
        columns = self._cache.capacity.columns - self._cache.tokens
        feeds: dict[Sequence, list[int]] = {}
        for sequence in wanted:
            start = len(self._rows[sequence].fed)
            feeds[sequence] = sequence.tokens[start : start + min(left, columns)]
            left -= len(feeds[sequence])
        return feeds

    def _feed(self, feeds: Mapping[Sequence, Seq[int]]) -> dict[Sequence, mx.array]:
        """Computes tokens; returns the logits ``[vocabulary]`` after each sequence's last one."""
        rows = [list(feeds.get(sequence, ())) for sequence in self._rows]
        tokens = [token for row in rows for token in row]
        if not tokens:
            return {}
        band = DraftedBand(self._cache, rows, ())
        fed = mx.array(tokens, mx.int32)
        logits = self._forward([self._cache], fed, [], (), [band]).logits
        assert logits is not None
        mx.eval(logits, self._cache.state)
        self._forward.commit(band, band.counts)
        last: dict[Sequence, mx.array] = {}
        stop = 0
        for sequence, row in zip(self._rows, rows, strict=True):
            stop += len(row)
            self._rows[sequence].fed += row
            if row:
                last[sequence] = logits[stop - 1]
        return last

    def _draw(
        self,
        sequences: Seq[Sequence],
        proposed: Mapping[Sequence, Seq[int]],
        logits: Mapping[Sequence, mx.array],
    ) -> list[int]:
        """The next token of each sequence, drawn as the engine would from these logits."""
        sampler = Sampler(self._vocabulary)
        sampler.rearrange([], [SamplerRow(_alike(self._params_of(s)), (), ()) for s in sequences])
        lines = mx.stack([logits[sequence][: self._vocabulary] for sequence in sequences])
        positions = [len(s.tokens) - s.prompt_tokens + len(proposed[s]) for s in sequences]
        tokens: Any = sampler.sample(lines, positions).tokens.tolist()
        drawn: list[int] = tokens
        return drawn


def _alike(params: SamplingParams) -> SamplingParams:
    """The parameters without what depends on earlier tokens, which only the engine counts."""
    return msgspec.structs.replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=None
    )
