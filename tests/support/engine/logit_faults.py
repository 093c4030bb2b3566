"""Puts NaN or infinity into the logits of one row, as an overflow in a model does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.engine.core.core import EngineCore
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.forward import ForwardOutput
from chairlift.engine.model.lora_routing import Slot

VALUES = {
    "nan": lambda row: mx.where(mx.arange(row.size) == row.size // 3, mx.nan, row),
    "all nan": lambda row: row * mx.nan,
    "+inf": lambda row: mx.where(mx.arange(row.size) == row.size - 1, mx.inf, row),
    "all -inf": lambda row: row - mx.inf,
}


class Faults:
    """Replaces a core's ``forward`` and spoils the logits of one choice in one step.

    Args:
        choice: request id and index.
        at: the number of the token that these logits choose; 0 follows the prompt.
        kind: a key of VALUES.

    Attributes:
        calls: how often ``forward`` was called.
        faulty_call: the number of the call whose logits were spoilt.
    """

    def __init__(self, core: EngineCore, choice: tuple[str, int], at: int, kind: str) -> None:
        self._core = core
        self._forward = core.pipeline.forward
        self._choice = choice
        self._at = at
        self._kind = kind
        self.calls = 0
        self.faulty_call: int | None = None
        self._fed: list[mx.array] = []

    def __call__(
        self,
        bands: Any,
        tokens: mx.array,
        chunks: Seq[Chunk],
        adapters: Seq[Slot] = (),
        drafted: Seq[DraftedBand] = (),
        shifts: Seq[int] = (),
    ) -> ForwardOutput:
        self.calls += 1
        self._fed.append(tokens)
        outcome = self._forward(bands, tokens, chunks, adapters, drafted, shifts)
        for row, sequence in enumerate(self._core.batch.rows):
            is_choice = (sequence.request_id, sequence.index) == self._choice
            if is_choice and sequence.generated == self._at:
                assert outcome.logits is not None
                assert self.faulty_call is None
                self.faulty_call = self.calls
                spoilt = VALUES[self._kind](outcome.logits[row].astype(mx.float32))
                rows = [*outcome.logits]
                rows[row] = spoilt.astype(outcome.logits.dtype)
                outcome = outcome._replace(logits=mx.stack(rows))
        return outcome

    @property
    def fed(self) -> list[int]:
        """The input tokens of all rows in all steps."""
        return [token for tokens in self._fed for token in np.array(tokens).tolist()]
