"""The limits of a batch: rows, tokens a step, bytes of KV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.cache.capacity import (
    COLUMN_STEP,
    Capacity,
    KVGeometry,
    bucket,
    padded,
    resized,
    rounded_up,
)

# Seconds by which one step of priority moves the time at which a request is due.
PRIORITY_AGEING = 10.0
# A request that waits for several rows lets requests pass that are due up to this many seconds
# later. A larger value keeps more rows busy and makes that request wait longer.
BYPASS = 2.0


class PromptSize(NamedTuple):
    """What a prompt's own cache holds: ``columns`` tokens, of which one model call writes ``step``
    at most.
    """

    columns: int
    step: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that each step keeps.

    Args:
        max_rows: rows of the decode batch.
        max_step_tokens: prompt and decode tokens of one step together.
        kv_bytes: bytes of all KV caches.
        geometry: the bytes that a token or a row takes in the model's layers.
        checkpoint: prompt chunks end at multiples of this many tokens, where recurrent states are
            kept; None: the model has none.
        chunk_multiple: a chunk that does not end its prompt has a multiple of this many tokens, if
            the step has room; the last chunk is padded to one (``cache.capacity.padded``).
        max_scored: prompt tokens of one step whose logits are computed, for log-probabilities.
        avoid_partial_prefill: a prompt waits rather than begin with a chunk smaller than a step of
            its own could hold.
        lookahead_columns: columns that a row gets beyond those it needs, if memory is left.
        step_seconds: the predicted time of a step with running rows; prompts are cut to keep it.
        max_step_stretch: such a step may take this many times what its rows alone take, where
            that is longer than ``step_seconds``.
        bands: groups of rows of similar length, each with buffers of its own, at most.
        band_bytes: bytes that another band has to save.
        ageing: seconds by which one level of priority delays a request.
        bypass: requests due up to this many seconds later may start before one that waits for
            several free rows.

    Raises:
        ValueError: a limit that cannot work, with the numbers.
    """

    max_rows: int
    max_step_tokens: int
    kv_bytes: int
    geometry: KVGeometry
    checkpoint: int | None = None
    chunk_multiple: int = 1
    max_scored: int = 512
    avoid_partial_prefill: bool = False
    lookahead_columns: int = 0
    step_seconds: float = math.inf
    max_step_stretch: float = 0.0
    bands: int = 1
    band_bytes: int = 1
    ageing: float = PRIORITY_AGEING
    bypass: float = BYPASS

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
        if self.max_scored < 1:
            raise ValueError(f"max-scored must be at least 1, not {self.max_scored}")
        if min(self.bands, self.band_bytes) < 1:
            raise ValueError(f"bands must be above 0: {self.bands} of {self.band_bytes} bytes")
        if not 0 < self.ageing < math.inf:
            raise ValueError(f"priority-ageing must be above 0 seconds, not {self.ageing:g}")
        if not 0 <= self.bypass < math.inf:
            raise ValueError(f"bypass must not be below 0 seconds or infinite: {self.bypass:g}")
        if self.max_context < COLUMN_STEP:
            raise ValueError(
                f"kv-memory of {self.kv_bytes} bytes holds {self.max_context} tokens of this "
                f"model ({self.geometry.bytes_per_token} bytes each); {COLUMN_STEP} are the least"
            )

    @property
    def max_context(self) -> int:
        """The most tokens, prompt and output, of a sequence that fits alone.

        Where no layer has full attention, memory sets no limit, and this is as good as none.
        """
        low, high = 0, self.kv_bytes // max(1, self.geometry.full_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.alone(middle) <= self.kv_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def alone(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens, prompt and output, needs on an idle engine.

        Beside its row it may need a prompt's cache as large, if it loses its place near its end and
        is computed anew. Its last token is not fed to the model, and in no cache.
        """
        row = Capacity(1, max(1, tokens - 1))
        return self.most_prompt_bytes(row.columns) + self.geometry.moved(Capacity(0, 0), row)

    def shortage(self, tokens: int) -> str:
        """What so many tokens need and what there is, for the client that is refused."""
        geometry = self.geometry
        each = [f"{geometry.full_bytes} bytes a token in full-attention layers"]
        each += [
            f"{size} bytes a token in layers with a window of {window} tokens"
            for window, size in geometry.window_bytes.items()
        ]
        each += [f"{geometry.row_bytes} bytes a row in recurrent layers"]
        kinds = ", ".join(kind for kind in each if not kind.startswith("0 "))
        return (
            f"{tokens} tokens need {self.alone(tokens)} bytes of KV memory, alone, and there are "
            f"{self.kv_bytes} ({kinds}); {self.max_context} tokens are the most"
        )

    def prompt_size(self, num_tokens: int, computed: int) -> PromptSize:
        """The size of the cache of a prompt of ``num_tokens`` tokens, ``computed`` of them cached.

        No chunk makes a cache of this size grow: the rest may be one padded chunk, and a window
        holds a whole chunk beside the keys that the chunk's first query sees.
        """
        rest = padded(num_tokens - computed, self.chunk_multiple)
        return PromptSize(computed + rest, min(rest, self._longest_chunk))

    def prompt_bytes(self, num_tokens: int, computed: int) -> int:
        """Bytes that the cache of ``prompt_size`` takes."""
        size = self.prompt_size(num_tokens, computed)
        return self.geometry.reserved(Capacity(1, size.columns), size.step)

    def least_prompt_bytes(self, num_tokens: int) -> int:
        """The same, however many tokens are not computed: no less than this."""
        return self.geometry.reserved(Capacity(1, num_tokens))

    def most_prompt_bytes(self, num_tokens: int) -> int:
        """The same, however many tokens are not computed: no more than this."""
        columns = num_tokens + self.chunk_multiple - 1
        return self.geometry.reserved(Capacity(1, columns), self._longest_chunk)

    @property
    def _longest_chunk(self) -> int:
        return rounded_up(self.max_step_tokens, self.chunk_multiple)

    def choose(
        self, needs: Seq[Capacity], hoped: Seq[Capacity], now: Seq[Capacity], besides: int = 0
    ) -> tuple[Capacity, ...] | None:
        """The capacities to give bands that must hold ``needs`` and have ``now``; None if none fit.

        They will soon have to hold ``hoped`` as well. ``besides`` is bytes taken elsewhere; what
        moving to other buffers takes for a moment counts too. Roomy sizes come first, since growing
        costs a copy.
        """
        sizes = [list(_sizes(*band)) for band in zip(needs, hoped, now, strict=True)]
        for capacities in zip(*sizes, strict=True):
            if self.geometry.moved_bands(now, capacities) + besides <= self.kv_bytes:
                return capacities
        return None


def _sizes(need: Capacity, hoped: Capacity, now: Capacity) -> Iterator[Capacity]:
    if not need.rows:
        yield from [Capacity(0, 0)] * 4
        return
    soon = Capacity(max(need.rows, hoped.rows), max(need.columns, hoped.columns))
    yield resized(soon, now)
    yield resized(need, now)
    yield Capacity(bucket(need.rows, 1), bucket(need.columns, COLUMN_STEP))
    yield need
