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

# Seconds by which one level of priority moves the time at which a request is due.
PRIORITY_AGEING = 10.0
# Requests due up to this many seconds later may pass one that waits for several free rows. A larger
# value keeps more rows busy and makes that request wait longer.
BYPASS = 2.0


class PromptSize(NamedTuple):
    """The size of a prompt's own KV cache.

    Attributes:
        columns: tokens that it holds.
        step: the most tokens that one model call writes.
    """

    columns: int
    step: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every step.

    Args:
        max_rows: maximum rows of the decode batch.
        max_step_tokens: maximum prompt and decode tokens of one step together.
        kv_bytes: bytes of all KV caches together.
        geometry: the bytes that a token or a row takes in the model's layers.
        checkpoint: prompt chunks end at multiples of this many tokens, because recurrent states
            are saved there. None: the model has no recurrent layers.
        chunk_multiple: a chunk that does not end its prompt has a multiple of this many tokens, if
            the step has room. The last chunk is padded to a multiple (``cache.capacity.padded``).
        max_scored: maximum prompt tokens of one step whose logits are computed, for
            log-probabilities.
        avoid_partial_prefill: a prompt waits rather than begin with a chunk smaller than a step of
            its own could hold.
        lookahead_columns: columns that a row gets beyond those it needs, if memory is left.
        step_seconds: maximum predicted seconds of a step with running rows; prompts are cut into
            chunks to keep it.
        max_step_stretch: a step with prompts may take this many times as long as its rows alone,
            if that is longer than ``step_seconds``.
        bands: maximum number of bands (groups of rows of similar length with buffers of their own).
        band_bytes: bytes that an additional band has to save.
        ageing: seconds by which one level of priority delays a request.
        bypass: requests due up to this many seconds later may start before one that waits for
            several free rows.

    Raises:
        ValueError: a limit cannot work; the text has the numbers.
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
        """The maximum tokens, prompt and output, of a sequence that has all KV memory to itself.

        Without a full-attention layer, memory sets no limit and this number is huge.
        """
        low, high = 0, self.kv_bytes // max(1, self.geometry.full_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.bytes_alone(middle) <= self.kv_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def bytes_alone(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` prompt and output tokens needs on an idle engine.

        Besides its row it may need a prompt cache of the same size: if it is preempted near its
        end, all its tokens are prefilled again. Its last token is never fed to the model, so no
        cache holds it.
        """
        row = Capacity(1, max(1, tokens - 1))
        return self.max_prompt_bytes(row.columns) + self.geometry.moved(Capacity(0, 0), row)

    def shortage(self, tokens: int) -> str:
        """The text for a refused client: bytes that ``tokens`` tokens need, and bytes available."""
        geometry = self.geometry
        each = [f"{geometry.full_bytes} bytes a token in full-attention layers"]
        each += [
            f"{size} bytes a token in layers with a window of {window} tokens"
            for window, size in geometry.window_bytes.items()
        ]
        each += [f"{geometry.row_bytes} bytes a row in recurrent layers"]
        kinds = ", ".join(kind for kind in each if not kind.startswith("0 "))
        return (
            f"{tokens} tokens need {self.bytes_alone(tokens)} bytes of KV memory, alone, and there "
            f"are {self.kv_bytes} ({kinds}); {self.max_context} tokens are the most"
        )

    def prompt_size(self, num_tokens: int, computed: int) -> PromptSize:
        """The cache size for a prompt of ``num_tokens`` tokens, of which ``computed`` are cached.

        A cache of this size never grows during prefill: it has room for the remaining tokens as one
        padded chunk, and a window layer has room for a full chunk plus the keys that the chunk's
        first query sees.
        """
        rest = padded(num_tokens - computed, self.chunk_multiple)
        return PromptSize(computed + rest, min(rest, self._longest_chunk))

    def prompt_bytes(self, num_tokens: int, computed: int) -> int:
        """Bytes of a cache of ``prompt_size``."""
        size = self.prompt_size(num_tokens, computed)
        return self.geometry.reserved(Capacity(1, size.columns), size.step)

    def min_prompt_bytes(self, num_tokens: int) -> int:
        """A lower bound of ``prompt_bytes`` for any number of cached tokens."""
        return self.geometry.reserved(Capacity(1, num_tokens))

    def max_prompt_bytes(self, num_tokens: int) -> int:
        """An upper bound of ``prompt_bytes`` for any number of cached tokens."""
        columns = num_tokens + self.chunk_multiple - 1
        return self.geometry.reserved(Capacity(1, columns), self._longest_chunk)

    @property
    def _longest_chunk(self) -> int:
        return rounded_up(self.max_step_tokens, self.chunk_multiple)

    def choose_capacities(
        self,
        needed: Seq[Capacity],
        expected: Seq[Capacity],
        now: Seq[Capacity],
        other_bytes: int = 0,
    ) -> tuple[Capacity, ...] | None:
        """Chooses the capacity of each band.

        Roomy capacities are tried first, since growing a buffer later costs a copy.

        Args:
            needed: what each band must hold in this step.
            expected: what each band will probably have to hold soon.
            now: the present capacities. The peak of memory while buffers are resized counts.
            other_bytes: bytes taken outside the bands.

        Returns:
            One capacity a band; None if even the smallest do not fit ``kv_bytes``.
        """
        sizes = [list(_sizes(*band)) for band in zip(needed, expected, now, strict=True)]
        for capacities in zip(*sizes, strict=True):
            if self.geometry.moved_bands(now, capacities) + other_bytes <= self.kv_bytes:
                return capacities
        return None


def _sizes(needed: Capacity, expected: Capacity, now: Capacity) -> Iterator[Capacity]:
    """Yields four capacities to try for a band, the roomiest first."""
    if not needed.rows:
        yield from [Capacity(0, 0)] * 4
        return
    soon = Capacity(max(needed.rows, expected.rows), max(needed.columns, expected.columns))
    yield resized(soon, now)
    yield resized(needed, now)
    yield Capacity(bucket(needed.rows, 1), bucket(needed.columns, COLUMN_STEP))
    yield needed
