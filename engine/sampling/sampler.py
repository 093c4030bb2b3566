"""Samples one step's tokens for all rows: bias, penalties, mask, temperature, filters, draw."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import compiled_sampling
from chairlift.engine.cpu.views import Scratch, view
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import DEFAULT_MODE, SamplingMode, TokenChoice
from chairlift.engine.sampling.drawing import column
from chairlift.engine.sampling.host.counts import HostCounts
from chairlift.engine.sampling.host.logprobs import host_logprobs
from chairlift.engine.sampling.logprobs import TopLogprobs, lazy_top_logprobs
from chairlift.engine.sampling.masks import Bits, masked
from chairlift.engine.sampling.penalties import TokenCounts

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
    def penalized(self) -> bool:
        """Whether the row's logits depend on the tokens that have occurred."""
        p = self.params
        return p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)


class Sampler:
    """Samples for the rows of one batch; call ``rearrange`` whenever the batch's rows change.

    Computes only what some row needs: a batch of greedy rows costs one argmax.

    Args:
        vocabulary: the last dimension of the logits.
        agree: maps this rank's outcomes to those of all ranks; see ``parallel.ranks.Ranks``.
        mode: how tokens are chosen.
    """

    def __init__(
        self,
        vocabulary: int,
        agree: Callable[[mx.array], mx.array] = lambda outcomes: outcomes,
        mode: SamplingMode = DEFAULT_MODE,
    ) -> None:
        self._vocabulary = vocabulary
        self._agree = agree
        self._mode = mode
        self._counts: TokenCounts | HostCounts | None = None
        # Memory for the logits after bias, penalties and mask.
        self._changed = Scratch()
        self._set_rows([])

    def _set_rows(self, rows: list[SamplerRow]) -> None:
        """Sets the rows, and finds out once which steps of sampling any of them needs."""
        self._rows = rows
        self._params = [row.params for row in rows]
        self._choice = TokenChoice(self._params, self._mode)
        # The numbers of the rows that request log-probabilities.
        self._scored = [i for i, params in enumerate(self._params) if params.logprobs is not None]
        self._bans = any(params.min_tokens for params in self._params)
        # Both are made at the first step with these rows: the numbers of the rows whose stop tokens
        # are banned, with the result of ``_entries``;
        self._bias: tuple[list[int], NDArray[np.float32]] | None = None
        # and repetition, presence and frequency penalty, each ``[rows, 1]``.
        self._penalties: tuple[mx.array, mx.array, mx.array] | None = None

    @property
    def needs_positions(self) -> bool:
        """Whether the next token of any row depends on the number of its output tokens."""
        return bool(self._choice.drawn) or self._bans

    def rearrange(self, kept: Seq[int], joined: Seq[SamplerRow]) -> None:
        """Keeps the rows numbered ``kept``, in that order, then adds ``joined``."""
        before = self._rows
        self._set_rows([before[row] for row in kept] + list(joined))
        counted = [(row.prompt, row.output) if row.penalized else None for row in joined]
        if not any(row.penalized for row in self._rows):
            self._counts = None
        elif self._counts is not None:
            self._counts.rearrange(kept, counted)
        else:
            # No earlier row has penalties.
            self._counts = HostCounts() if self._mode.on_host else TokenCounts(self._vocabulary)
            self._counts.rearrange([], [None] * len(kept) + counted)

    def sample(self, logits: mx.array, generated: Seq[int], masks: Bits | None = None) -> Sampled:
        """Chooses a token for every row.

        Args:
            logits: ``[rows, vocabulary]`` of any float type; further lines are ignored.
            generated: each row's number of output tokens so far; may be empty unless
                ``needs_positions``. Together with the seed it determines the draw, so neither other
                rows nor an interruption change it.
            masks: ``[rows, words]``, the tokens that each row may choose; None allows all.
        """
        sample = self._sample_on_host if self._mode.on_host else self._sample_lazily
        return sample(logits, generated, masks)

    def _sample_lazily(self, logits: mx.array, generated: Seq[int], masks: Bits | None) -> Sampled:
        """``sample`` by operations of MLX."""
        count = len(self._rows)
        if self._counts is not None or masks is not None:
            logits = logits[:count]
        raw = changed = logits.astype(mx.float32)
        entries = self._entries(generated)
        if entries.size:
            rows, tokens, addends = map(mx.array, entries)
            changed = changed.at[rows.astype(mx.int32), tokens.astype(mx.int32)].add(addends)
        if isinstance(self._counts, TokenCounts):
            self._penalties = self._penalties or (
                column(self._params, lambda p: p.repetition_penalty),
                column(self._params, lambda p: p.presence_penalty),
                column(self._params, lambda p: p.frequency_penalty),
            )
            changed = self._counts.penalize(changed, *self._penalties)
        if masks is not None:
            changed = masked(changed, masks)
        final = logits if changed is raw else changed
        found = self._choice(final, logits, generated, masks is not None)[:count]
        outcomes = self._agree(found)
        tokens = mx.maximum(outcomes, 0)
        if self._counts is not None:
            self._counts.count(tokens)
        logprobs = None
        if self._scored:
            index = mx.array(self._scored, mx.int32)
            values = lazy_top_logprobs(raw[index], tokens[index], self._top)
            logprobs = Logprobs(self._scored, values)
        return Sampled(tokens, outcomes, logprobs)

    def _sample_on_host(self, logits: mx.array, generated: Seq[int], masks: Bits | None) -> Sampled:
        """``sample`` by ``sampling.host``. Evaluates the logits."""
        logits = logits.astype(mx.float32)
        raw = changed = np.ascontiguousarray(view(logits)[: len(self._rows)])
        entries = self._entries(generated)
        if entries.size or self._counts is not None:
            changed = self._changed.array(np.float32, *raw.shape)
            np.copyto(changed, raw)
            rows, tokens = entries[:2].astype(np.int64)
            np.add.at(changed, (rows, tokens), entries[2])
        if isinstance(self._counts, HostCounts):
            self._counts.penalize(changed, self._params)
        if masks is not None:
            allowed = self._changed.array(np.float32, *raw.shape) if changed is raw else changed
            compiled_sampling.mask(changed, masks, into=allowed)
            changed = allowed
        lines = np.arange(len(raw))
        raw_best = compiled_sampling.highest(raw, lines)
        best = raw_best if changed is raw else compiled_sampling.highest(changed, lines)
        is_masked = masks is not None
        found = self._choice.on_host(changed, best, raw_best.values, generated, is_masked)
        outcomes = self._agree(mx.array(found))
        chosen = mx.maximum(outcomes, 0)
        if self._counts is not None:
            self._counts.count(chosen)
        logprobs = None
        if self._scored:
            index = np.array(self._scored)
            values = host_logprobs(raw, index, raw_best, view(chosen)[index], self._top)
            logprobs = Logprobs(self._scored, TopLogprobs(*map(mx.array, values)))
        return Sampled(chosen, outcomes, logprobs)

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
            drafts: each row's draft, of tokens and ``scheduler.drafts.FILLER``.
            masks: ``[tokens, words]``.

        Returns:
            Sampled ``[tokens]``.
        """
        # NOTE: the device waits for this, so nothing is computed that no row needs.
        owners = [row for row, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
        positions = self._repeated(owners)
        if self._counts is not None:
            # Tokens after a filler are never kept, so any token may stand in for a filler.
            known = [[max(token, 0) for token in draft] for draft in drafts]
            before = [draft[:i] for draft in known for i in range(len(draft) + 1)]
            positions._counts = self._counts.continued(owners, before)
        lengths: list[int] = []
        if self.needs_positions:
            lengths = [
                done + i
                for done, draft in zip(generated, drafts, strict=True)
                for i in range(len(draft) + 1)
            ]
        return positions.sample(logits, lengths, masks)

    def _repeated(self, owners: Seq[int]) -> Sampler:
        """A sampler, without counts, whose rows are those numbered ``owners``."""
        other = Sampler(self._vocabulary, self._agree, self._mode)
        other._rows = [self._rows[row] for row in owners]
        other._params = [self._params[row] for row in owners]
        other._choice = TokenChoice(other._params, self._mode)
        other._scored = _places(owners, self._scored, len(self._rows))
        other._bans = self._bans
        other._changed = self._changed
        return other

    def count(self, outcomes: Seq[Seq[int]]) -> None:
        """Counts the tokens that each row has kept after ``sample_drafts``.

        Args:
            outcomes: those of each row; failure codes count as token 0.
        """
        if self._counts is not None:
            tokens = [[max(outcome, 0) for outcome in kept] for kept in outcomes]
            self._counts = self._counts.continued(range(len(tokens)), tokens)

    def _entries(self, generated: Seq[int]) -> NDArray[np.float32]:
        """What is added to logits: each row's logit_bias, and what bans its stop tokens before
        min_tokens. ``[3, entries]``: row, token, addend; integers below 2^24 are exact.
        """
        early: list[int] = []
        if self._bans:
            counted = zip(generated, self._params, strict=True)
            early = [row for row, (done, params) in enumerate(counted) if done < params.min_tokens]
        if self._bias is None or self._bias[0] != early:
            entries = [
                (row, token, value)
                for row, params in enumerate(self._params)
                for token, value in params.logit_bias.items()
            ]
            entries += [
                (row, token, _BANNED) for row in early for token in self._params[row].stop_token_ids
            ]
            inside = [entry for entry in entries if 0 <= entry[1] < self._vocabulary]
            self._bias = early, np.array(inside, np.float32).reshape(-1, 3).T
        return self._bias[1]

    @property
    def _top(self) -> int:
        """How many likely tokens' log-probabilities any row requests."""
        wanted = (self._params[row].logprobs or 0 for row in self._scored)
        return min(max(wanted), self._vocabulary)


def _places(owners: Seq[int], wanted: Seq[int], rows: int) -> list[int]:
    """The places in ``owners`` of the numbers in ``wanted``.

    Args:
        owners: numbers of rows, in any order and any number of times.
        wanted: different numbers of rows.
        rows: how many rows there are.
    """
    if len(wanted) in (0, rows):
        return list(range(len(owners))) if wanted else []
    among = set(wanted)
    return [place for place, owner in enumerate(owners) if owner in among]


def check_row(row: SamplerRow, vocabulary: int) -> None:
    """Samples once for a row alone, so that an error hits no other row.

    MLX only builds its graph; on a CPU compiled functions choose a token.

    Raises:
        Exception: of any type; sampling with the row's parameters fails in any batch.
    """
    alone = Sampler(vocabulary)
    alone.rearrange([], [row])
    alone.sample(mx.zeros((1, vocabulary)), [len(row.output)])
