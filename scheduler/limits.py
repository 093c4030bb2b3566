"""The limits of a batch: rows, tokens a step, bytes of KV."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from chairlift.cache.capacity import COLUMN_STEP, KVGeometry
from chairlift.cache.pages.budget import PageBudget
from chairlift.scheduler.columns import ColumnMemory, PromptSize
from chairlift.scheduler.memory import Memory
from chairlift.scheduler.pages import PageMemory

# Seconds by which one level of priority moves the time at which a request is due.
PRIORITY_AGEING = 10.0
# Requests due up to this many seconds later may pass one that waits for several free rows. A larger
# value keeps more rows busy and makes that request wait longer.
BYPASS = 2.0
# Prompts that arrive within this many times a prompt's own time may overtake it. If these others
# leave it a fourth of the time, it is done before its turn comes, and delays no other prompt.
PREFILL_SLACK = 4.0


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
            Over pages, whole steps are padded instead (``cache.pages.page.step_size``).
        max_scored: maximum prompt tokens of one step whose logits are computed, for
            log-probabilities.
        avoid_partial_prefill: a prompt waits rather than begin with a chunk smaller than a step of
            its own could hold.
        lookahead_columns: columns that a row gets beyond those it needs, if memory is left.
        step_seconds: maximum predicted seconds of a step with running rows; prompts are cut into
            chunks to keep it.
        max_step_stretch: a step with prompts may take this many times as long as its rows alone,
            if that is longer than ``step_seconds``. Other steps may take longer, too: where a
            single prompt token takes long, and for a prompt of more than
            ``chunks.LONG_PROMPT_STEPS`` steps. 0: none of these.
        bands: maximum number of bands (groups of rows of similar length with buffers of their own).
        band_bytes: bytes that an additional band has to save.
        ageing: seconds by which one level of priority delays a request.
        bypass: requests due up to this many seconds later may start before one that waits for
            several free rows.
        prefill_slack: a prompt's turn is later by this many times the time that it takes alone,
            so that shorter prompts overtake it. 0: first come, first served.
        draft_tokens: maximum proposed tokens of a row that one step verifies.
        paged: the KV memory consists of pages; there are no bands, and ``chunk_multiple`` takes no
            memory. False: it consists of columns.

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
    prefill_slack: float = PREFILL_SLACK
    draft_tokens: int = 0
    paged: bool = False

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max-rows must be at least 1, not {self.max_rows}")
        if self.max_step_tokens <= self.max_rows:
            raise ValueError(
                f"max-step-tokens ({self.max_step_tokens}) must be larger than max-rows "
                f"({self.max_rows}): every running row takes one token of each step"
            )
        if not self.step_seconds > 0:  # also if it is not a number
            raise ValueError(f"max-step-ms must be above 0, not {self.step_seconds * 1e3:g}")
        if self.max_scored < 1:
            raise ValueError(f"max-scored must be at least 1, not {self.max_scored}")
        if min(self.bands, self.band_bytes) < 1:
            raise ValueError(f"bands must be above 0: {self.bands} of {self.band_bytes} bytes")
        if self.paged and self.bands > 1:
            raise ValueError(f"pages have no bands, not {self.bands}")
        if not 0 < self.ageing < math.inf:
            raise ValueError(f"priority-ageing must be above 0 seconds, not {self.ageing:g}")
        if not 0 <= self.bypass < math.inf:
            raise ValueError(f"bypass must not be below 0 seconds or infinite: {self.bypass:g}")
        if not 0 <= self.prefill_slack < math.inf:
            raise ValueError(
                f"prefill-slack must not be below 0 or infinite: {self.prefill_slack:g}"
            )
        if self.max_context < COLUMN_STEP:
            raise ValueError(
                f"kv-memory of {self.kv_bytes} bytes holds {self.max_context} tokens of this "
                f"model ({self.geometry.bytes_per_token} bytes each); {COLUMN_STEP} are the least"
            )

    @property
    def columns(self) -> ColumnMemory:
        """The memory as columns."""
        return ColumnMemory(
            self.kv_bytes, self._drafting, self.max_step_tokens, self.chunk_multiple
        )

    @property
    def pages(self) -> PageBudget | None:
        """The pages of each kind of layer; None without ``paged``."""
        if not self.paged:
            return None
        return PageBudget.divided(
            self.kv_bytes, self._drafting, self.max_rows, self.max_step_tokens
        )

    @property
    def page_memory(self) -> PageMemory:
        """The memory as pages; only with ``paged``."""
        budget = self.pages
        assert budget is not None
        return PageMemory(budget, self.kv_bytes, self._drafting, self.max_step_tokens)

    @property
    def _drafting(self) -> KVGeometry:
        """The geometry, with room for the tokens of a draft."""
        return replace(self.geometry, step=1 + self.draft_tokens)

    @property
    def memory(self) -> Memory:
        """The memory as ``paged`` says."""
        return self.page_memory if self.paged else self.columns

    @property
    def max_context(self) -> int:
        """See ``Memory.max_context``."""
        return self.memory.max_context

    def bytes_alone(self, tokens: int) -> int:
        """See ``Memory.bytes_alone``."""
        return self.memory.bytes_alone(tokens)

    def shortage(self, tokens: int) -> str:
        """See ``Memory.shortage``."""
        return self.memory.shortage(tokens)

    def prompt_size(self, num_tokens: int, computed: int) -> PromptSize:
        """See ``ColumnMemory.prompt_size``."""
        return self.columns.prompt_size(num_tokens, computed)

    def prompt_bytes(self, num_tokens: int, computed: int) -> int:
        """See ``Memory.prompt_bytes``."""
        return self.memory.prompt_bytes(num_tokens, computed)
