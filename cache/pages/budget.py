"""How many pages each kind of attention layer has, and how many a sequence takes of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.pages.page import PAGE_TOKENS, page_count

# Prompts in prefill, besides all rows, for which windows get pages if memory is not short, and
# recurrent layers get states.
PROMPTS = 4
# The pages of a pool that no sequence gets: page 0, the target of reads and writes without a token.
UNUSED_PAGES = 1


def touched(tokens: int) -> int:
    """The most pages that ``tokens`` (at least 1) neighbouring positions may touch."""
    return page_count(tokens - 1) + 1


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The pools of pages, one for each kind of attention layer.

    A page of a kind stands for that page in all layers of the kind.

    Attributes:
        pages: for each window (None: full attention) the pages of its pool. Page 0 of each pool is
            among them, and no sequence gets it.
        states: states of recurrent layers; None: the model has no such layers.
    """

    pages: Mapping[int | None, int]
    states: int | None = None

    @classmethod
    def divided(
        cls, kv_bytes: int, geometry: KVGeometry, max_rows: int, max_step_tokens: int
    ) -> PageBudget:
        """Divides ``kv_bytes`` among the kinds of layers.

        A window gets the pages that ``max_rows`` rows and ``PROMPTS`` prompts in prefill need at
        most. If memory is short, all kinds get the same number of pages. The last kind, full
        attention if there is any, gets the rest. With too little memory a pool may be empty.
        """
        states = max_rows + PROMPTS if geometry.row_bytes else None
        left = max(0, kv_bytes - (states or 0) * geometry.row_bytes)
        rooms = {
            window: max_rows * touched(window - 1 + geometry.step)
            + PROMPTS * touched(window - 1 + max_step_tokens)
            + UNUSED_PAGES
            for window, size in geometry.window_bytes.items()
            if size
        }
        kinds: list[int | None] = [*sorted(rooms, key=rooms.__getitem__)]
        if geometry.full_bytes:
            kinds.append(None)
        sizes = [page_bytes(geometry, kind) for kind in kinds]
        pages: dict[int | None, int] = {}
        for number, kind in enumerate(kinds):
            equal = left // sum(sizes[number:])
            last = number == len(kinds) - 1
            pages[kind] = equal if last or kind is None else min(rooms[kind], equal)
            left -= pages[kind] * sizes[number]
        return cls(pages, states)

    @property
    def usable(self) -> tuple[int, ...]:
        """The pages of each kind, in the order of ``pages``, that sequences can have."""
        return tuple(max(0, number - UNUSED_PAGES) for number in self.pages.values())

    def bounds(self, step: int = 1) -> tuple[int, ...]:
        """The most pages of each kind that a sequence has, however long it is.

        A window layer has given back the pages that no later query sees when a sequence gets pages
        for the next ``step`` tokens: of the tokens before them, their first query sees
        ``window - 1``.
        """
        return tuple(
            sys.maxsize if window is None else touched(window - 1 + step) for window in self.pages
        )

    def pages_of(self, tokens: int, step: int = 1) -> tuple[int, ...]:
        """The most pages of each kind of a sequence until it has ``tokens`` cached tokens.

        Args:
            tokens: its tokens, those that the present step writes included.
            step: the most tokens that one step writes.
        """
        count = page_count(tokens)
        return tuple(min(count, bound) for bound in self.bounds(step))


def page_bytes(geometry: KVGeometry, window: int | None) -> int:
    """Bytes of a page in all layers of a kind."""
    size = geometry.full_bytes if window is None else geometry.window_bytes[window]
    return PAGE_TOKENS * size
