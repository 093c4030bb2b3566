"""KV memory as pages: a prompt's pages become its row's; choices share those of their prompt."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.pages.budget import PageBudget, page_bytes
from chairlift.cache.pages.page import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Implements ``Memory``. All sizes are rounded up to whole pages.

    Attributes:
        budget: the pages that there are.
        kv_bytes, geometry, max_step_tokens: those of ``Limits``.
    """

    budget: PageBudget
    kv_bytes: int
    geometry: KVGeometry
    max_step_tokens: int

    @property
    def max_context(self) -> int:
        """See ``Memory``."""
        # One token more would fit if it were an output's last, which is never cached. But a prompt
        # without an output caches its last token.
        bounds = self.budget.bounds(self.max_step_tokens)
        return min(
            (
                usable * PAGE_TOKENS
                for usable, bound in zip(self.budget.usable, bounds, strict=True)
                if usable < bound
            ),
            default=self.kv_bytes + 1,
        )

    def bytes_alone(self, tokens: int) -> int:
        """See ``Memory``."""
        return self._bytes(self.prompt(tokens))

    def shortage(self, tokens: int) -> str:
        """See ``Memory``."""
        needs = ", ".join(
            f"{pages} pages of {PAGE_TOKENS} tokens in "
            + (f"layers with a window of {window} tokens" if window else "full-attention layers")
            + f" ({usable} exist)"
            for window, pages, usable in zip(
                self.budget.pages, self.prompt(tokens), self.budget.usable, strict=True
            )
        )
        return (
            f"{tokens} tokens need {needs} in {self.kv_bytes} bytes of KV memory; "
            f"{self.max_context} tokens are the most"
        )

    def prompt_bytes(self, num_tokens: int, computed: int) -> int:
        """See ``Memory``."""
        return self.min_prompt_bytes(num_tokens)

    def min_prompt_bytes(self, num_tokens: int) -> int:
        """See ``Memory``: cached tokens take pages as computed ones do."""
        return self._bytes(self.prompt(num_tokens))

    def fits_together(self, rows: int, num_tokens: int) -> bool:
        """See ``Memory``."""
        forked = self.forked(num_tokens, num_tokens + PAGE_TOKENS, rows)
        prompt = self.prompt(num_tokens)
        needed = map(max, forked, prompt)
        return all(n <= usable for n, usable in zip(needed, self.budget.usable, strict=True))

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Pages of each kind of a prompt in prefill."""
        return self.budget.pages_of(num_tokens, self.max_step_tokens)

    def forked(self, shared: int, num_tokens: int, choices: int) -> tuple[int, ...]:
        """Pages of each kind of choices of ``num_tokens`` tokens that share their first ``shared``.

        Choices share full pages only. The pages of windows count once for each choice, because soon
        no choice sees the prompt.
        """
        full = (choices - 1) * self.shared_pages(shared)
        pages = self.budget.pages_of(num_tokens, self.geometry.step)
        return tuple(
            choices * count - (full if window is None else 0)
            for window, count in zip(self.budget.pages, pages, strict=True)
        )

    def shared_pages(self, tokens: int) -> int:
        """Pages of the full-attention layers that choices share whose prompt has ``tokens``."""
        return tokens // PAGE_TOKENS

    def rows(self, lengths: list[int]) -> list[int]:
        """Pages of each kind that rows of these lengths take if they share none."""
        counts = [-(-length // PAGE_TOKENS) for length in lengths]
        most = max(counts, default=0)
        return [
            sum(counts) if most <= bound else sum(min(count, bound) for count in counts)
            for bound in self.budget.bounds(self.geometry.step)
        ]

    def _bytes(self, pages: tuple[int, ...]) -> int:
        sizes = (page_bytes(self.geometry, window) for window in self.budget.pages)
        counted = zip(pages, sizes, strict=True)
        return sum(count * size for count, size in counted) + self.geometry.row_bytes
