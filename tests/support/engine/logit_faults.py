"""Puts numbers that are not finite into the logits of one row, as a model's overflow would."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.core.core import EngineCore
from chairlift.engine.model.forward import Chunk, Outcome

VALUES = {
    "nan": lambda row: mx.where(mx.arange(row.size) == row.size // 3, mx.nan, row),
    "all nan": lambda row: row * mx.nan,
    "+inf": lambda row: mx.where(mx.arange(row.size) == row.size - 1, mx.inf, row),
    "all -inf": lambda row: row - mx.inf,
}


class Faults:
    """Stands in for a core's ``forward``: one choice's logits are bad where it chooses a token.

    Args:
        choice: request id and index; it fails in the place of its token number ``at``, 0 being the
            one that follows the prompt.
        kind: of VALUES.
    """

    def __init__(self, core: EngineCore, choice: tuple[str, int], at: int, kind: str) -> None:
        self._core = core
        self._forward = core.pipeline.forward
        self._choice = choice
        self._at = at
        self._kind = kind
        self.calls = 0
        # The call in which it happened.
        self.struck: int | None = None
        self._fed: list[mx.array] = []

    def __call__(self, bands: Any, tokens: mx.array, chunks: Seq[Chunk]) -> Outcome:
        self.calls += 1
        self._fed.append(tokens)
        outcome = self._forward(bands, tokens, chunks)
        for row, sequence in enumerate(self._core.batch.rows):
            own = (sequence.request_id, sequence.index) == self._choice
            if own and sequence.generated == self._at:
                assert outcome.logits is not None
                assert self.struck is None
                self.struck = self.calls
                bad = VALUES[self._kind](outcome.logits[row].astype(mx.float32))
                rows = [*outcome.logits]
                rows[row] = bad.astype(outcome.logits.dtype)
                outcome = outcome._replace(logits=mx.stack(rows))
        return outcome

    @property
    def fed(self) -> list[int]:
        """All tokens that rows were fed, of all steps."""
        return [token for tokens in self._fed for token in np.array(tokens).tolist()]
