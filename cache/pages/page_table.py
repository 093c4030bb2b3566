"""The table in which kernels look up the pages of a step's sequences.

It is one array of numbers, ``[entries]`` int32: a line for each sequence, which is the entry of the
sequence's page 0; then a 0; then the page numbers of all sequences, one after the other. So its
size does not depend on how long a single sequence is, and steps with the same number of tokens have
tables of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chairlift.cache.pages.upload import Numbers

# Entries of a table, or four times as many, and so on: enough for the pages of a million tokens.
MIN_ENTRIES = 1 << 14


class PageLists(NamedTuple):
    """The page numbers of several sequences, one after the other.

    Attributes:
        starts: ``[sequences]``: page ``i`` of a sequence is ``pages[start + i]``, for each page
            that the sequence has. A start is below 0 if a window has left more pages behind.
        pages: ``[pages]``.
    """

    starts: Numbers
    pages: Numbers

    @classmethod
    def empty(cls, sequences: int) -> PageLists:
        """The lists of sequences whose only page is page 0, which belongs to none."""
        return cls(np.zeros(sequences, np.int32), np.zeros(1, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[PageLists]) -> PageLists:
        """The lists of all sequences of ``parts``."""
        sizes = np.array([len(part.pages) for part in parts], np.int32)
        begins = np.cumsum(sizes, dtype=np.int32) - sizes
        starts = [part.starts + begin for part, begin in zip(parts, begins, strict=True)]
        return cls(np.concatenate(starts), np.concatenate([part.pages for part in parts]))


def page_table(lists: PageLists, lines: int) -> Numbers:
    """The table of these sequences.

    Args:
        lines: how many lines it has. Those behind the sequences' have only page 0.
    """
    first = lines + 1
    entries = MIN_ENTRIES
    while entries < first + len(lists.pages):
        entries *= 4
    table = np.zeros(entries, np.int32)
    table[: len(lists.starts)] = lists.starts + np.int32(first)
    table[len(lists.starts) : lines] = lines
    table[first : first + len(lists.pages)] = lists.pages
    return table
