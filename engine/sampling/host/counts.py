"""Penalties on tokens that have occurred, applied only to these tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from typing import Self

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.penalties import HIGHEST

# The least number of new tokens for which memory is added at a time.
_ROOM = 64


class _RowCounts:
    """The different tokens of a row's prompt and output, and their counts in its output."""

    def __init__(self, prompt: Seq[int], output: Seq[int]) -> None:
        self._tokens = np.unique(np.asarray(prompt, np.int64))
        self._counts = np.zeros(len(self._tokens), np.int32)
        self._places = dict(zip(self._tokens.tolist(), range(len(self._tokens)), strict=True))
        self.add(output)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._places = self._places.copy()
        return other

    def add(self, output: Seq[int]) -> None:
        """Counts tokens of the output."""
        for token in output:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                room = max(_ROOM, place)
                self._tokens = np.concatenate([self._tokens, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
            self._tokens[place] = token
            self._counts[place] += 1

    def penalize(self, line: Floats, params: SamplingParams) -> None:
        """Changes the row's logits ``[vocabulary]``."""
        size = len(self._places)
        tokens, counts = self._tokens[:size], self._counts[:size]
        repetition, presence, frequency = (
            np.float32(penalty)
            for penalty in (
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        )
        logits = line[tokens]
        repeated = np.where(logits > 0, logits / repetition, logits * repetition)
        logits = np.clip(repeated, np.minimum(logits, -HIGHEST), HIGHEST)
        logits -= presence * (counts > 0)
        logits -= frequency * counts.astype(np.float32)
        line[tokens] = logits


class HostCounts:
    """As ``penalties.TokenCounts``, for rows of which only some may have penalties."""

    def __init__(self, rows: Seq[_RowCounts | None] = ()) -> None:
        self._rows = list(rows)

    def rearrange(self, kept: Seq[int], joined: Seq[tuple[Seq[int], Seq[int]] | None]) -> None:
        """Keeps the rows numbered ``kept``, in that order, then adds (prompt, output) rows; None
        for those without penalties.
        """
        self._rows = [self._rows[row] for row in kept]
        self._rows += [None if own is None else _RowCounts(*own) for own in joined]

    def continued(self, rows: Seq[int], outputs: Seq[Seq[int]]) -> HostCounts:
        """The counts of these rows, each with some more output tokens.

        Args:
            rows: numbers of rows, in any order and any number of times.
            outputs: for each of ``rows``, tokens within the vocabulary.
        """
        counts = HostCounts([copy(self._rows[row]) for row in rows])
        for row, output in zip(counts._rows, outputs, strict=True):
            if row is not None:
                row.add(output)
        return counts

    def count(self, tokens: mx.array) -> None:
        """Counts one output token of every row, ``[rows]``."""
        for row, token in zip(self._rows, view(tokens).tolist(), strict=True):
            if row is not None:
                row.add([token])

    def penalize(self, lines: Floats, params: Seq[SamplingParams]) -> None:
        """Changes logits ``[rows, vocabulary]``; finite ones stay finite."""
        with np.errstate(over="ignore"):
            for row, line, own in zip(self._rows, lines, params, strict=True):
                if row is not None:
                    row.penalize(line, own)
