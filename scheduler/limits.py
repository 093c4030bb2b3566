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
    """``max_step_tokens`` bounds prompt and decode tokens of one step together.

    ``checkpoint`` is the distance in tokens at which a prompt's chunks have to end, so that states
    which cannot be cut can be kept there; None where there are none. A chunk that does not end its
    prompt has a multiple of ``chunk_multiple`` tokens, if there is room for that many, and the last
    one is padded to such a multiple (``cache.capacity.padded``). Of no more than ``max_scored``
    prompt tokens in a step logits are computed, for their log-probabilities. With ``whole``, a
    prompt of which a step of its own could hold more is not begun beside others. Rows are given
    ``ahead`` columns more than they need yet, if there is memory. Beside rows that run, prompts are
    cut so that a step takes no longer than ``step_seconds``, or ``stretch`` times what the rows
    alone would take if that is longer, as far as can be foreseen. Rows of unlike length are kept
    apart, in ``bands`` at most, of which each has to save ``band_bytes``. Who waits is due
    ``ageing`` seconds later for each step that its priority is above 0. Those due up to ``bypass``
    seconds after one that finds too few rows free may begin before it.

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
    whole: bool = False
    ahead: int = 0
    step_seconds: float = math.inf
    stretch: float = 0.0
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

    def prompt_size(self, wanted: int, begun: int) -> PromptSize:
        """The cache of a prompt of ``wanted`` tokens whose first ``begun`` are not computed.

        With it no chunk makes the cache grow: the rest may come in one, padded, and a window has to
        hold a whole chunk beside what its first query sees.
        """
        rest = padded(wanted - begun, self.chunk_multiple)
        return PromptSize(begun + rest, min(rest, self._longest_chunk))

    def prompt_bytes(self, wanted: int, begun: int) -> int:
        """Bytes that the cache of ``prompt_size`` takes."""
        size = self.prompt_size(wanted, begun)
        return self.geometry.reserved(Capacity(1, size.columns), size.step)

    def least_prompt_bytes(self, wanted: int) -> int:
        """The same, however many tokens are not computed: no less than this."""
        return self.geometry.reserved(Capacity(1, wanted))

    def most_prompt_bytes(self, wanted: int) -> int:
        """The same, however many tokens are not computed: no more than this."""
        columns = wanted + self.chunk_multiple - 1
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
