"""The pages of each row of a batch, for one kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from chairlift.cache.pages.page import PAGE_TOKENS, doubled, page_count
from chairlift.cache.pages.piece import Run
from chairlift.cache.pages.pool import Page, PagePool, page_of
from chairlift.cache.pages.step import Table

# Entries of a table's row; longer rows have twice as many, or four times: steps have few different
# shapes.
MIN_WIDTH = 16


@dataclass(slots=True)
class _Row:
    """One row's pages.

    Attributes:
        pages: page ``first + i`` of the sequence is ``pages[i]``.
        first: how many pages the window has left behind.
        oldest: the oldest position whose token is in a page.
    """

    pages: list[Page] = field(default_factory=list)
    first: int = 0
    oldest: int = 0


class PageRows:
    """The rows' pages in one pool, and the table of their numbers for the kernels."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._rows: list[_Row] = []
        self._table: Table = np.zeros((0, MIN_WIDTH), np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def table(self, width: int) -> Table:
        """The page numbers of all rows: ``[rows, width]``, 0 where a row has no page."""
        self._widen(width)
        return self._table[: len(self._rows), :width]

    @property
    def width(self) -> int:
        """Entries that the longest row needs in the table, rounded up; see ``MIN_WIDTH``."""
        return _rounded(max((row.first + len(row.pages) for row in self._rows), default=0))

    def join(self) -> None:
        """Adds an empty row."""
        if len(self._rows) == len(self._table):
            more = np.zeros((max(4, len(self._table)), self._table.shape[1]), np.int32)
            self._table = np.concatenate([self._table, more])
        self._table[len(self._rows)] = 0
        self._rows.append(_Row())

    def grow(self, row: int, stop: int) -> None:
        """Takes the pages that a row needs to write up to the position ``stop``.

        Raises:
            OutOfPages: there are too few.
        """
        pages = self._rows[row]
        for index in range(pages.first + len(pages.pages), page_count(stop)):
            page = self.pool.take()
            pages.pages.append(page)
            self._widen(index + 1)
            self._table[row, index] = page.number

    def shed(self, row: int, position: int) -> None:
        """Gives back the pages that no query at ``position`` or later can see."""
        if self.pool.window is None:
            return
        pages = self._rows[row]
        oldest = self.pool.oldest_seen(position)
        if page_of(oldest) > pages.first:
            left = page_of(oldest) - pages.first
            self._table[row, pages.first : pages.first + left] = 0
            del pages.pages[:left]
            pages.first += left
        pages.oldest = max(pages.oldest, PAGE_TOKENS * pages.first)

    def trim(self, row: int, stop: int) -> None:
        """Gives back the pages behind the position ``stop``."""
        pages = self._rows[row]
        kept = max(0, page_count(stop) - pages.first)
        if len(pages.pages) > kept:
            self._table[row, pages.first + kept :] = 0
            del pages.pages[kept:]

    def run(self, row: int, start: int, stop: int) -> Run:
        """The newest tokens of ``[start, stop)`` that the row has, shared by reference."""
        pages = self._rows[row]
        whole = Run(tuple(pages.pages), pages.oldest, pages.oldest, stop)
        return whole.part(max(start, pages.oldest), stop)

    def adopt(self, row: int, run: Run) -> Page | None:
        """Gives an empty row the pages of a run. It must own its last page to append to it.

        Returns:
            The page whose tokens have to be copied to the row's last page, because another sequence
            may append to that page; None if there is none.
        """
        pages = self._rows[row]
        pages.first = page_of(run.oldest)
        pages.oldest = run.oldest
        pages.pages = list(run.pages)
        self._widen(pages.first + len(pages.pages))
        end = run.stop % PAGE_TOKENS
        source = None
        if end and pages.pages:
            if pages.pages[-1].end == end:
                pages.pages[-1].end = None
            else:
                source, pages.pages[-1] = pages.pages[-1], self.pool.take()
        numbers = [page.number for page in pages.pages]
        self._table[row, pages.first : pages.first + len(numbers)] = numbers
        return source

    def begin(self, row: int, oldest: int) -> None:
        """Sets an empty row's first page to that of the position ``oldest``."""
        self._rows[row].first, self._rows[row].oldest = page_of(oldest), oldest

    def last(self, row: int, count: int) -> Sequence[Page]:
        """The last ``count`` pages of a row."""
        pages = self._rows[row].pages
        return pages[len(pages) - count :]

    def release(self, row: int, stop: int) -> None:
        """Lets another sequence continue in the last page of a row that ends at ``stop``."""
        pages = self._rows[row]
        if stop % PAGE_TOKENS and len(pages.pages) >= page_count(stop) - pages.first > 0:
            last = pages.pages[page_count(stop) - pages.first - 1]
            last.end = stop % PAGE_TOKENS

    def arrange(self, order: Sequence[int]) -> None:
        """Keeps the rows ``order``, in this order."""
        self._table[: len(order)] = self._table[list(order)]
        self._rows = [self._rows[row] for row in order]

    def mark(self, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Marks the numbers of all pages of the rows."""
        used[self.table(self.width).ravel()] = True

    def _widen(self, width: int) -> None:
        if width > self._table.shape[1]:
            wider = np.zeros((len(self._table), _rounded(width)), np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider

    def check_integrity(self, offsets: Sequence[int]) -> None:
        """Asserts the invariants between two steps, for rows of these lengths."""
        assert len(self._rows) == len(offsets)
        for row, (pages, offset) in enumerate(zip(self._rows, offsets, strict=True)):
            numbers = [page.number for page in pages.pages]
            stop = pages.first + len(numbers)
            assert self._table[row, pages.first : stop].tolist() == numbers, row
            assert not self._table[row, : pages.first].any(), row
            assert not self._table[row, stop:].any(), row
            # A row whose draft is being verified may have more pages.
            assert stop >= page_count(offset), (row, stop, offset)
            assert page_of(pages.oldest) == pages.first or not numbers, (row, pages)
            assert pages.oldest <= self.pool.oldest_seen(offset), (row, pages, offset)
            if offset % PAGE_TOKENS and numbers:
                assert pages.pages[-1].end is None, (row, "another sequence may append")


def table_widths(tokens: int) -> list[int]:
    """All numbers of entries that tables may have for sequences of up to ``tokens`` tokens."""
    widths = [MIN_WIDTH]
    while widths[-1] < page_count(tokens):
        widths.append(2 * widths[-1])
    return widths


def _rounded(width: int) -> int:
    return doubled(MIN_WIDTH, width)
