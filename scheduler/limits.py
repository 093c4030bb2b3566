"""What a batch may take: rows, tokens a step, bytes of KV."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chairlift.cache.capacity import COLUMN_STEP, Capacity, KVGeometry, bucket, resized

# Seconds that one step of priority is worth.
PRIORITY_AGEING = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_step_tokens`` bounds prompt and decode tokens of one step together.

    ``checkpoint`` is the distance in tokens at which a prompt's chunks have to end, so that states
    which cannot be cut can be kept there; None where there are none. A chunk that does not end its
    prompt has a multiple of ``chunk_multiple`` tokens, if there is room for that many. Rows are
    given ``ahead`` columns more than they need yet, if there is memory. Beside rows
    that run, prompts are cut so that a step takes no longer than ``step_seconds``, or ``stretch``
    times what the rows alone would take if that is longer, as far as can be foreseen. Who waits is
    due ``ageing`` seconds later for each step that its priority is above 0.

    Raises:
        ValueError: a limit that cannot work, with the numbers.
    """

    max_rows: int
    max_step_tokens: int
    kv_bytes: int
    geometry: KVGeometry
    checkpoint: int | None = None
    chunk_multiple: int = 1
    ahead: int = 0
    step_seconds: float = math.inf
    stretch: float = 0.0
    ageing: float = PRIORITY_AGEING

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max-rows must be at least 1, not {self.max_rows}")
        if self.max_step_tokens <= self.max_rows:
            raise ValueError(
                f"max-step-tokens ({self.max_step_tokens}) must be larger than max-rows "
                f"({self.max_rows}): every running row takes one token of each step"
            )
        if self.step_seconds <= 0:
            raise ValueError(f"max-step-ms must be above 0, not {self.step_seconds * 1e3:g}")
        if not 0 < self.ageing < math.inf:
            raise ValueError(f"priority-ageing must be above 0 seconds, not {self.ageing:g}")
        if self.max_context < COLUMN_STEP:
            raise ValueError(
                f"kv-memory of {self.kv_bytes} bytes holds {self.max_context} tokens of this "
                f"model ({self.geometry.bytes_per_token} bytes each); {COLUMN_STEP} are the least"
            )

    @property
    def max_context(self) -> int:
        """The longest sequence that fits alone: in a prefill batch and, at its end, in its row."""
        low, high = 0, self.kv_bytes // max(1, self.geometry.bytes_per_token) + 1
        while low < high:
            middle = (low + high + 1) // 2
            alone = Capacity(1, middle)
            twice = self.prefill_bytes(alone) + self.geometry.reserved(alone)
            low, high = (middle, high) if twice <= self.kv_bytes else (low, middle - 1)
        return low

    def prefill_bytes(self, capacity: Capacity) -> int:
        """Bytes that a batch of prompts takes; its windows have to hold a whole chunk as well."""
        return self.geometry.reserved(capacity, self.max_step_tokens)

    def choose(
        self, need: Capacity, hoped: Capacity, now: Capacity, besides: int = 0
    ) -> Capacity | None:
        """The capacity to give a batch that must hold ``need`` and has ``now``; None if none fits.

        It will soon have to hold ``hoped``, which is no less than ``need``. ``besides`` is bytes
        taken elsewhere. Roomy sizes come first, since growing costs a copy.
        """
        roomy = Capacity(bucket(need.rows, 1), bucket(need.columns, COLUMN_STEP))
        for capacity in (resized(hoped, now), resized(need, now), roomy, need):
            if self.geometry.reserved(capacity) + besides <= self.kv_bytes:
                return capacity
        return None
