"""Copies of pages that are made together, before any of the pages is read or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import numpy as np


class NumberedPage(Protocol):
    """A page, which stays in use as long as it is referenced; see ``pool.Page``."""

    number: int


class PageCopies:
    """The pending copies of one kind's pages, each of them in all layers of the kind.

    A sequence that goes on within a page that another may append to needs its own copy. One
    operation a layer makes the copies of all sequences that join a step.

    Attributes:
        layers: functions that copy pages in a layer's buffers, see ``PageKernels.copy``. A layer
            that has never been written has none.
    """

    def __init__(self) -> None:
        self.layers: list[Callable[[mx.array], mx.array]] = []
        # The pages stay in use until they are copied.
        self._pending: list[tuple[NumberedPage, NumberedPage]] = []

    def add(self, source: NumberedPage, target: NumberedPage) -> None:
        """Copies ``source`` to ``target`` with the next ``dispatch``."""
        if any(source is written for _, written in self._pending):
            self.dispatch()  # copies that are made together have no order
        self._pending.append((source, target))

    def dispatch(self) -> None:
        """Makes the pending copies.

        Pages are read and written in the order of dispatch: call it before anything else that reads
        or writes pages is dispatched.
        """
        if not self._pending:
            return
        numbers = np.array([(s.number, t.number) for s, t in self._pending], np.int32)
        pairs = mx.array(numbers)
        mx.async_eval([copy(pairs) for copy in self.layers])
        self._pending.clear()
