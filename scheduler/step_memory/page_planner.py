"""Decides whether another prompt fits into the pools of pages next to a step's rows and prompts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import add

from chairlift.cache.capacity import Capacity
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.bands import ONE_BAND


class PagePlanner:
    """Implements ``MemoryPlan``: counts the pages of each kind.

    A row has the pages of its cached tokens and of the one that it gains. A prompt in prefill has
    those of the whole prompt, because they become its row's. Nothing grows or moves.

    Choices that forked share the full pages of their prompt (``Sequence.shares_prompt``), and
    sequences that began with the same prefix share the full pages of it (``Sequence.pages``). Its
    last page is copied if it is not full, so a prompt that begins takes both.

    Args:
        limits: the limits to keep.
        decode: the sequences whose rows gain a token.
        prefill: prompts that are being computed; their rows will join the batch.
        now: the present capacities, which stay as they are.
        drafted: tokens that each row may gain in this step besides one.
    """

    def __init__(
        self,
        limits: Limits,
        decode: Seq[Sequence],
        prefill: Iterable[Sequence],
        now: Seq[Capacity],
        drafted: int = 0,
    ) -> None:
        self._memory = limits.page_memory
        self._now = tuple(now)
        lengths = [s.num_tokens for s in decode]
        self.rows = len(decode)
        self.context = sum(lengths)
        self.bands = ONE_BAND
        self.places = dict.fromkeys(decode, 0)
        self.moved = 0
        # The numbers of all pages of cached prefixes that these sequences have.
        self._prefixes: set[int] = set()
        later = [_later(s, length) for s, length in zip(decode, lengths, strict=True)]
        shared = self._shared(decode)
        needed = [length + drafted for length in lengths]
        self._needed = list(map(add, self._memory.rows(needed), shared))
        # The pages of rows and prompts when each row has one page more.
        self._expected = list(map(add, self._memory.rows(later), shared))
        self._states = self.rows
        for sequence in prefill:
            self.add(sequence, 0)

    def add(self, sequence: Sequence, prompt_bytes: int) -> None:
        """Reserves a prompt's pages, and rows for its choices."""
        needed, expected = self._pages(sequence)
        self._prefixes.update(sequence.pages)
        self._needed = list(map(add, self._needed, needed))
        self._expected = list(map(add, self._expected, expected))
        self.rows += sequence.rows
        self._states += max(1, sequence.rows)

    def capacities(
        self, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        """The present capacities if all fit; None if pages are too few.

        Next to other rows ``more`` must leave one page for each row that still grows.
        """
        pages, states = self._needed, self._states
        if more is not None:
            needed, expected = self._pages(more)
            states += max(1, more.rows)
            # Alone it fits without a spare page: otherwise it would wait for ever.
            pages = list(
                map(add, self._expected, expected) if self.rows else map(add, pages, needed)
            )
        budget = self._memory.budget
        fits = all(n <= usable for n, usable in zip(pages, budget.usable, strict=True))
        return self._now if fits and states <= (budget.states or states) else None

    def _pages(self, prompt: Sequence) -> tuple[list[int], list[int]]:
        """The pages of each kind of a prompt and its rows, and with one page more for each row."""
        tokens = prompt.num_tokens
        first = min(tokens + 1, max(tokens, prompt.max_total_tokens - 1))
        # Without a token to feed to the model, no choice gets a row in the pages.
        choices = prompt.rows if first > tokens else 1
        memory = self._memory
        in_prefill = memory.prompt(tokens)
        now, later = (
            list(map(max, in_prefill, memory.forked(tokens, length, choices)))
            for length in (first, _later(prompt, first))
        )
        again = self._in_full_attention(-sum(page in self._prefixes for page in prompt.pages))
        if prompt.copies_page and not prompt.computed:
            again = [pages + 1 for pages in again]
        return list(map(add, now, again)), list(map(add, later, again))

    def _shared(self, decode: Iterable[Sequence]) -> list[int]:
        """Pages of each kind, below 0, that rows have in common."""
        forked: set[str] = set()
        saved = 0
        for sequence in decode:
            if sequence.shares_prompt:
                if sequence.request_id in forked:
                    saved -= self._memory.shared_pages(sequence.prompt_tokens)
                    continue
                forked.add(sequence.request_id)
            if sequence.pages:
                before = len(self._prefixes)
                self._prefixes.update(sequence.pages)
                saved -= len(sequence.pages) - (len(self._prefixes) - before)
        return self._in_full_attention(saved)

    def _in_full_attention(self, pages: int) -> list[int]:
        """So many pages of the full-attention layers, for each kind."""
        return [pages if window is None else 0 for window in self._memory.budget.pages]


def _later(sequence: Sequence, tokens: int) -> int:
    """A page more than ``tokens``, or all tokens that the sequence ever feeds to the model."""
    return max(tokens, min(tokens + PAGE_TOKENS, sequence.max_total_tokens - 1))
