"""The pages of each row of a batch, for one kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from chairlift.cache.pages.page import PAGE_TOKENS, doubled, page_count
from chairlift.cache.pages.page_table import PageLists
from chairlift.cache.pages.piece import PageRun
from chairlift.cache.pages.pool import Page, PagePool, page_of
from chairlift.cache.pages.upload import Numbers

# Page numbers that a row has room for at first.
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
    """The rows' pages in one pool, and their numbers for the kernels."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._rows: list[_Row] = []
        # The numbers of each row's pages, then anything.
        self._numbers: Numbers = np.zeros((0, MIN_WIDTH), np.int32)
        # Of each row, the number of its pages, and its first one.
        self._spans: Numbers = np.zeros((0, 2), np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lists(self) -> PageLists:
        """The page numbers of all rows."""
        rows = len(self._rows)
        counts, firsts = self._spans[:rows].T
        most = int(counts.max(initial=0))
        held = np.arange(most, dtype=np.int32) < counts[:, None]
        ends = np.cumsum(counts, dtype=np.int32)
        return PageLists(ends - counts - firsts, self._numbers[:rows, :most][held])

    def join(self) -> None:
        """Adds an empty row."""
        row = len(self._rows)
        if row == len(self._numbers):
            more = max(4, row)
            self._numbers = np.pad(self._numbers, ((0, more), (0, 0)))
            self._spans = np.pad(self._spans, ((0, more), (0, 0)))
        self._rows.append(_Row())
        self._count(row)

    def grow(self, row: int, stop: int) -> None:
        """Takes the pages that a row needs to write up to the position ``stop``.

        Raises:
            OutOfPages: there are too few.
        """
        pages = self._rows[row]
        for _ in range(pages.first + len(pages.pages), page_count(stop)):
            self._append(row, self.pool.take())

    def grow_all(self, stops: Numbers) -> None:
        """Calls ``grow`` for each row that needs a page; ``stops`` are ``[rows]``. Few do."""
        for row in np.flatnonzero(self._ends < -(-stops // PAGE_TOKENS)).tolist():
            self.grow(row, int(stops[row]))

    def give_back(self, stops: Numbers) -> None:
        """Gives back the pages that no query at ``stops[r]`` or later in row ``r`` can see.

        The same for the pages behind that position.
        """
        window = self.pool.window
        if window is not None:
            seen = (stops - window + 1) // PAGE_TOKENS
            for row in np.flatnonzero(seen > self._spans[: len(self), 1]).tolist():
                self._shed(row, int(seen[row]))
        for row in np.flatnonzero(self._ends > -(-stops // PAGE_TOKENS)).tolist():
            self._trim(row, int(stops[row]))

    @property
    def _ends(self) -> Numbers:
        """Of each row, the index of the page behind its last one."""
        ends: Numbers = self._spans[: len(self)].sum(axis=1, dtype=np.int32)
        return ends

    def _shed(self, row: int, first: int) -> None:
        """Gives back the pages before page ``first`` of a row's sequence."""
        pages = self._rows[row]
        del pages.pages[: first - pages.first]
        pages.first = first
        pages.oldest = max(pages.oldest, PAGE_TOKENS * first)
        self._write(row)

    def _trim(self, row: int, stop: int) -> None:
        """Gives back the pages behind the position ``stop``."""
        pages = self._rows[row]
        del pages.pages[max(0, page_count(stop) - pages.first) :]
        self._count(row)

    def run(self, row: int, start: int, stop: int) -> PageRun:
        """The newest tokens of ``[start, stop)`` that the row has, shared by reference."""
        pages = self._rows[row]
        whole = PageRun(tuple(pages.pages), pages.oldest, pages.oldest, stop)
        return whole.part(max(start, pages.oldest), stop)

    def adopt(self, row: int, run: PageRun) -> Page | None:
        """Gives an empty row the pages of a run. It must own its last page to append to it.

        Returns:
            The page whose tokens have to be copied to the row's last page, because another sequence
            may append to that page; None if there is none.
        """
        pages = self._rows[row]
        pages.first = page_of(run.oldest)
        pages.oldest = run.oldest
        pages.pages = list(run.pages)
        end = run.stop % PAGE_TOKENS
        source = None
        if end and pages.pages:
            if pages.pages[-1].end == end:
                pages.pages[-1].end = None
            else:
                source, pages.pages[-1] = pages.pages[-1], self.pool.take()
        self._write(row)
        return source

    def begin(self, row: int, oldest: int) -> None:
        """Sets an empty row's first page to that of the position ``oldest``."""
        self._rows[row].first, self._rows[row].oldest = page_of(oldest), oldest
        self._count(row)

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
        for array in (self._numbers, self._spans):
            array[: len(order)] = array[list(order)]
        self._rows = [self._rows[row] for row in order]

    def mark(self, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Marks the numbers of all pages of the rows."""
        used[self.lists.pages] = True

    def _append(self, row: int, page: Page) -> None:
        """Adds a page to a row."""
        pages = self._rows[row].pages
        pages.append(page)
        self._widen(len(pages))
        self._numbers[row, len(pages) - 1] = page.number
        self._count(row)

    def _write(self, row: int) -> None:
        """Writes all of a row's page numbers."""
        pages = self._rows[row].pages
        self._widen(len(pages))
        self._numbers[row, : len(pages)] = [page.number for page in pages]
        self._count(row)

    def _count(self, row: int) -> None:
        """Writes how many pages a row has, and its first one."""
        self._spans[row] = len(self._rows[row].pages), self._rows[row].first

    def _widen(self, width: int) -> None:
        if (more := doubled(MIN_WIDTH, width) - self._numbers.shape[1]) > 0:
            self._numbers = np.pad(self._numbers, ((0, 0), (0, more)))

    def check_integrity(self, offsets: Sequence[int]) -> None:
        """Asserts the invariants between two steps, for rows of these lengths."""
        assert len(self._rows) == len(offsets)
        for row, (pages, offset) in enumerate(zip(self._rows, offsets, strict=True)):
            numbers = [page.number for page in pages.pages]
            stop = pages.first + len(numbers)
            assert self._numbers[row, : len(numbers)].tolist() == numbers, row
            assert self._spans[row].tolist() == [len(numbers), pages.first], row
            # A row whose draft is being verified may have more pages.
            assert stop >= page_count(offset), (row, stop, offset)
            assert page_of(pages.oldest) == pages.first or not numbers, (row, pages)
            assert pages.oldest <= self.pool.oldest_seen(offset), (row, pages, offset)
            if offset % PAGE_TOKENS and numbers:
                assert pages.pages[-1].end is None, (row, "another sequence may append")
