"""The pages of one kind of layer: which are free, and which sequences hold which.

A page's number stands for a place in the buffers of all layers of the kind. References are counted
by Python itself: a page is free as soon as no ``Page`` object of that number exists.
"""

from __future__ import annotations

from collections.abc import Callable

from chairlift.cache.pages.copies import PageCopies
from chairlift.cache.pages.page import PAGE_TOKENS


class OutOfPages(MemoryError):
    """More pages are needed than the pool has. The scheduler's plan has to prevent this."""


class Page:
    """One page, held by every list that contains this object.

    Only one sequence may append to a page. Snapshots share the tokens that are in it already.

    Attributes:
        number: its place in the buffers.
        end: the slot where a sequence may continue to write; None while a sequence may append.
    """

    __slots__ = ("_pool", "end", "number")

    def __init__(self, pool: PagePool, number: int) -> None:
        self._pool = pool
        self.number = number
        self.end: int | None = None

    def __del__(self) -> None:
        self._pool.free.append(self.number)


class PagePool:
    """The pages of all layers of one kind.

    Page 0 belongs to no sequence: tables contain it where they have no page, and the padding of
    compiled steps writes to it.

    Args:
        window: the window of these layers in tokens; None: full attention.
        pages: the number of pages, without page 0.
        reclaim: called when no page is free; drops cached prefixes, one or more, and returns
            whether it dropped any.

    Attributes:
        copies: copies of pages that are still to be made.
    """

    def __init__(
        self, window: int | None, pages: int, reclaim: Callable[[], bool] = lambda: False
    ) -> None:
        self.window = window
        self.pages = pages
        self.reclaim = reclaim
        self.copies = PageCopies()
        # The lowest numbers are taken first.
        self.free = list(range(pages, 0, -1))

    @property
    def used(self) -> int:
        """The number of pages that are held."""
        return self.pages - len(self.free)

    def take(self) -> Page:
        """Takes a free page.

        Raises:
            OutOfPages: all pages are held, and no prefix can be dropped.
        """
        while not self.free:
            if not self.reclaim():
                raise OutOfPages(f"all {self.pages} pages are in use (window {self.window})")
        return Page(self, self.free.pop())

    def oldest_seen(self, position: int) -> int:
        """The oldest position that a query at ``position``, or any later one, can see."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def page_of(position: int) -> int:
    """The index, in a sequence's list, of the page with a position."""
    return position // PAGE_TOKENS
