"""Samples one step's tokens for all rows: bias, penalties, mask, temperature, filters, draw."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.draw import sample_categorical
from chairlift.engine.sampling.filters import thresholds
from chairlift.engine.sampling.logprobs import TopLogprobs, top_logprobs
from chairlift.engine.sampling.masks import Bits, masked
from chairlift.engine.sampling.math import exp
from chairlift.engine.sampling.outcomes import row_outcomes
from chairlift.engine.sampling.penalties import TokenCounts

# Temperatures below this (vLLM's bound) are greedy, because all weights would be 1 or 0.
GREEDY_BELOW = 1e-5
# Added to a stop token's logit before min_tokens. It is finite, so that the row can still end where
# a grammar allows only a stop token.
_BANNED = -1e30


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of the rows that requested them; ``values`` has one line per row."""

    rows: list[int]
    values: TopLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, on the device.

    Attributes:
        tokens: ``[rows]`` int32, the rows' next inputs. Each is in the vocabulary, even if the row
            has failed.
        outcomes: ``[rows]`` int32, the same tokens, or negative failure codes; see
            ``sampling.outcomes``.
        logprobs: None if no row requested any.
    """

    tokens: mx.array
    outcomes: mx.array
    logprobs: Logprobs | None

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation."""
        if self.logprobs is None:
            return [self.tokens, self.outcomes]
        return [self.tokens, self.outcomes, *self.logprobs.values]


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """A row's parameters; ``prompt`` and ``output`` are its tokens at the time that it joined."""

    params: SamplingParams
    prompt: Seq[int]
    output: Seq[int]

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)


class Sampler:
    """Samples for the rows of one batch; call ``rearrange`` whenever the batch's rows change.

    Computes only what some row needs: a batch of greedy rows costs one argmax.

    Args:
        vocabulary: the last dimension of the logits.
        agree: maps this rank's outcomes to those of all ranks; see ``parallel.ranks.Ranks``.
        size: the number of lines to compute for so many rows, where sizes that recur are faster.
    """

    def __init__(
        self,
        vocabulary: int,
        agree: Callable[[mx.array], mx.array] = lambda outcomes: outcomes,
        size: Callable[[int], int] = int,
    ) -> None:
        self._vocabulary = vocabulary
        self._agree = agree
        self._size = size
        self._rows: list[SamplerRow] = []
        self._counts: TokenCounts | None = None
        self._bias: tuple[list[bool], mx.array] | None = None

    def rearrange(self, kept: Seq[int], joined: Seq[SamplerRow]) -> None:
        """Keeps the rows numbered ``kept``, in that order, then adds ``joined``."""
        before = self._rows
        self._rows = [before[row] for row in kept] + list(joined)
        self._bias = None
        if not any(row.penalized for row in self._rows):
            self._counts = None
        elif self._counts is not None:
            self._counts.rearrange(kept, [(row.prompt, row.output) for row in joined])
        else:
            # No earlier row has penalties, so their counts are never read.
            self._counts = TokenCounts(self._vocabulary)
            rows = [((), ()) for _ in kept] + [(row.prompt, row.output) for row in joined]
            self._counts.rearrange([], rows)

    def sample(self, logits: mx.array, generated: Seq[int], masks: Bits | None = None) -> Sampled:
        """Chooses a token for every row.

        Args:
            logits: ``[rows, vocabulary]`` of any float type; further lines are ignored.
            generated: each row's number of output tokens so far. Together with the seed it
                determines the draw, so neither other rows nor an interruption change it.
            masks: ``[rows, words]``, the tokens that each row may choose; None allows all.
        """
        count = len(self._rows)
        if self._counts is not None or masks is not None:
            logits = logits[:count]
        raw = logits.astype(mx.float32)
        logits = self._biased(raw, generated)
        if self._counts is not None:
            logits = self._counts.penalize(
                logits,
                self._column(lambda p: p.repetition_penalty),
                self._column(lambda p: p.presence_penalty),
                self._column(lambda p: p.frequency_penalty),
            )
        if masks is not None:
            logits = masked(logits, masks)
        chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
        best = mx.take_along_axis(logits, chosen[:, None], axis=-1)
        sampling = [i for i, row in enumerate(self._rows) if not row.greedy]
        if sampling and len(sampling) == count:
            drawn = _repeated(sampling, len(logits))
            chosen = self._draw(logits, best, chosen, drawn, generated)
        elif sampling:
            drawn = _repeated(sampling, self._size(len(sampling)))
            index = mx.array(drawn, mx.int32)
            picked = self._draw(logits[index], best[index], chosen[index], drawn, generated)
            own = index[: len(sampling)]
            chosen = chosen.at[own].add(picked[: len(sampling)] - chosen[own])
        found = row_outcomes(chosen, best[:, 0], raw, masks is not None)[:count]
        outcomes = self._agree(found)
        tokens = mx.maximum(outcomes, 0)
        if self._counts is not None:
            self._counts.count(tokens)
        return Sampled(tokens, outcomes, self._logprobs(raw, tokens))

    def sample_drafts(
        self,
        logits: mx.array,
        generated: Seq[int],
        drafts: Seq[Seq[int]],
        masks: Bits | None = None,
    ) -> Sampled:
        """Chooses a token after each row's last token, and after each token of its draft.

        Each choice is the one that ``sample`` makes if the draft's tokens before it are the row's
        output. So a row that keeps the right tokens of its draft has the same output as without,
        with the same distribution and seed. Call ``count`` with the tokens that each row keeps.

        Args:
            logits: ``[tokens, vocabulary]``, row by row: ``1 + len(drafts[r])`` of row ``r``.
            generated: each row's number of output tokens before its draft.
            drafts: each row's draft.
            masks: ``[tokens, words]``.

        Returns:
            Sampled ``[tokens]``.
        """
        owners = [row for row, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
        before = [draft[:i] for draft in drafts for i in range(len(draft) + 1)]
        positions = Sampler(self._vocabulary, self._agree, self._size)
        positions._rows = [self._rows[row] for row in owners]
        if self._counts is not None:
            positions._counts = self._counts.continued(owners, before)
        lengths = zip(owners, before, strict=True)
        return positions.sample(logits, [generated[r] + len(done) for r, done in lengths], masks)

    def count(self, outputs: Seq[Seq[int]]) -> None:
        """Counts the tokens that each row has kept after ``sample_drafts``."""
        if self._counts is not None:
            self._counts = self._counts.continued(range(len(outputs)), outputs)

    def _column(
        self, read: Callable[[SamplingParams], float], rows: Seq[int] | None = None
    ) -> mx.array:
        """One parameter of all rows, or of ``rows``, as ``[rows, 1]`` float32."""
        chosen = self._rows if rows is None else [self._rows[row] for row in rows]
        return mx.array([read(row.params) for row in chosen], mx.float32)[:, None]

    def _biased(self, logits: mx.array, generated: Seq[int]) -> mx.array:
        """Adds each row's logit_bias, and bans its stop tokens before min_tokens."""
        early = [
            done < row.params.min_tokens for done, row in zip(generated, self._rows, strict=True)
        ]
        if self._bias is None or self._bias[0] != early:
            self._bias = early, self._bias_entries(early)
        entries = self._bias[1]
        if entries.shape[1] == 0:
            return logits
        rows, tokens = entries[0].astype(mx.int32), entries[1].astype(mx.int32)
        return logits.at[rows, tokens].add(entries[2])

    def _bias_entries(self, early: Seq[bool]) -> mx.array:
        """``[3, entries]`` float32: row, token, addend. Integers below 2^24 are exact."""
        entries = [
            (row, token, value)
            for row, r in enumerate(self._rows)
            for token, value in r.params.logit_bias.items()
        ]
        entries += [
            (row, token, _BANNED)
            for row, r in enumerate(self._rows)
            if early[row]
            for token in r.params.stop_token_ids
        ]
        inside = [entry for entry in entries if 0 <= entry[1] < self._vocabulary]
        return mx.array(np.array(inside, np.float32).reshape(-1, 3).T)

    def _draw(
        self,
        logits: mx.array,
        best: mx.array,
        likeliest: mx.array,
        rows: Seq[int],
        generated: Seq[int],
    ) -> mx.array:
        """Samples one token from each row's distribution.

        Args:
            logits: ``[rows, vocabulary]``.
            best: ``[rows, 1]``, each row's highest logit.
            likeliest: ``[rows]`` int32, the token with that logit; no filter removes it.
        """
        params = [self._rows[row].params for row in rows]
        # Subtract the highest logit first, so that nothing overflows at any temperature.
        weights = exp((logits - best) / self._column(lambda p: p.temperature, rows))
        top_k = top_p = min_p = None
        if any(p.top_k > 0 for p in params):
            top_k = self._column(lambda p: p.top_k, rows)
        if any(p.top_p < 1 for p in params):
            top_p = self._column(lambda p: p.top_p, rows)
        if any(p.min_p > 0 for p in params):
            min_p = self._column(lambda p: p.min_p, rows)
        if top_k is not None or top_p is not None or min_p is not None:
            minimum = thresholds(weights, top_k, top_p, min_p)
            weights = mx.where(weights >= minimum, weights, 0.0)
        seeds = [_key(p.seed, generated[row]) for p, row in zip(params, rows, strict=True)]
        tokens = sample_categorical(weights, mx.array(seeds, mx.uint32))
        weight = mx.take_along_axis(weights, tokens[:, None], axis=-1)[:, 0]
        return mx.where(weight > 0, tokens, likeliest)

    def _logprobs(self, logits: mx.array, tokens: mx.array) -> Logprobs | None:
        requested = {i: r.params.logprobs for i, r in enumerate(self._rows)}
        rows = [row for row, k in requested.items() if k is not None]
        if not rows:
            return None
        index = mx.array(rows, mx.int32)
        top = min(max(requested[row] or 0 for row in rows), self._vocabulary)
        return Logprobs(rows, top_logprobs(logits[index], tokens[index], top))


def check_row(row: SamplerRow, vocabulary: int) -> None:
    """Builds the sampling graph of a row alone, without evaluating it.

    Raises:
        Exception: of any type; sampling with the row's parameters fails in any batch.
    """
    alone = Sampler(vocabulary)
    alone.rearrange([], [row])
    alone.sample(mx.zeros((1, vocabulary)), [len(row.output)])


def _repeated(rows: list[int], lines: int) -> list[int]:
    """So many ``lines``: the rows, and the first of them again and again."""
    return [*rows, *[rows[0]] * (lines - len(rows))]


def _key(seed: int, position: int) -> tuple[int, int]:
    """The random key for one token: two 32-bit words (splitmix64's finalizer)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 31
    return x >> 32, x & 0xFFFFFFFF
