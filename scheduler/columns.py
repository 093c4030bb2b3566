"""KV memory as buffers of columns: a prompt has a cache of its own, a band's rows share buffers."""

from __future__ import annotations

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


class PromptSize(NamedTuple):
    """The size of a prompt's own KV cache.

    Attributes:
        columns: tokens that it holds.
        step: the most tokens that one model call writes.
    """

    columns: int
    step: int


@dataclass(frozen=True, slots=True)
class ColumnMemory:
    """Implements ``Memory``. The attributes are those of ``Limits``."""

    kv_bytes: int
    geometry: KVGeometry
    max_step_tokens: int
    chunk_multiple: int

    @property
    def max_context(self) -> int:
        """See ``Memory``."""
        low, high = 0, self.kv_bytes // max(1, self.geometry.full_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.bytes_alone(middle) <= self.kv_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def bytes_alone(self, tokens: int) -> int:
        """See ``Memory``. Besides its row it may need a prompt cache of the same size.

        An output's last token is never fed to the model, so no cache holds it. A prompt without an
        output has no row, and its cache takes less than both.
        """
        row = Capacity(1, max(1, tokens - 1))
        return self._max_prompt_bytes(row.columns) + self.geometry.moved(Capacity(0, 0), row)

    def shortage(self, tokens: int) -> str:
        """See ``Memory``."""
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
        """See ``Memory``."""
        return self.geometry.reserved(Capacity(1, num_tokens))

    def fits_together(self, rows: int, num_tokens: int) -> bool:
        """See ``Memory``."""
        all_rows = [Capacity(rows, num_tokens + COLUMN_STEP)]
        prompt_bytes = self._max_prompt_bytes(num_tokens)
        chosen = self.choose_capacities(all_rows, all_rows, [Capacity(0, 0)], prompt_bytes)
        return chosen is not None

    def _max_prompt_bytes(self, num_tokens: int) -> int:
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
        sizes = (_sizes(*band) for band in zip(needed, expected, now, strict=True))
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
