"""Work that requests wait for: disk reads, swapped states, grammars, the encoding of images.

The core uses all of this work through one protocol, ``Background``, and does not see its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from chairlift.cache.swap.swap import Swap
from chairlift.engine.grammar.pending import Grammars
from chairlift.engine.model.vision.encoder import ImageEncoder
from chairlift.scheduler.sequence import Sequence


class Collected(NamedTuple):
    """The results of finished work that the scheduler needs.

    Attributes:
        blocked: waiting sequences that cannot begin until something has been read from disk.
        ready: requests that need not wait any longer.
        failed: the errors of requests that cannot be served, by request id.
    """

    blocked: Seq[Sequence] = ()
    ready: Collection[str] = ()
    failed: Mapping[str, BaseException] = {}


NOTHING_NEW = Collected()


class Background(Protocol):
    """One kind of work that runs beside the steps."""

    @property
    def due(self) -> bool:
        """Whether ``collect``, or the next step's stats, would have something new."""
        ...

    def on_due(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``, which other threads call whenever this may have become ``due``."""
        ...

    def collect(self) -> Collected:
        """Returns the results of finished work, and starts the next work."""
        ...

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot begin before some of this work has finished."""
        ...

    def drop(self, sequence: Sequence, last: bool) -> None:
        """Removes a sequence that has ended; ``last``: it was the last of its request."""
        ...

    def close(self, timeout: float) -> None:
        """Ends the work, and saves what outlives the process, within ``timeout`` seconds."""
        ...


class SwapWork:
    """The ``Background`` of a swap: moves states of preempted rows to and from disk."""

    def __init__(self, swap: Swap[Sequence]) -> None:
        self._swap = swap
        self.on_due = swap.on_due
        self.is_awaited = swap.fetching

    @property
    def due(self) -> bool:
        return self._swap.due

    def collect(self) -> Collected:
        on_disk = self._swap.work()
        return Collected(blocked=on_disk) if on_disk else NOTHING_NEW

    def drop(self, sequence: Sequence, last: bool) -> None:
        self._swap.drop(sequence)

    def close(self, timeout: float) -> None:
        self._swap.close()


class GrammarWork:
    """The ``Background`` of grammars: compiles them."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.on_due = grammars.on_due
        self.is_awaited = grammars.awaited

    @property
    def due(self) -> bool:
        return self._grammars.due

    def collect(self) -> Collected:
        done = self._grammars.take_done()
        if not done:
            return NOTHING_NEW
        failed = {request: error for request, error in done.items() if error is not None}
        return Collected(ready=done, failed=failed)

    def drop(self, sequence: Sequence, last: bool) -> None:
        if last:
            self._grammars.drop(sequence.request_id)

    def close(self, timeout: float) -> None:
        """Does nothing: grammars are not kept on disk."""


class ImageWork:
    """The ``Background`` of images: the encoder works between two steps (``EngineCore.step``)."""

    def __init__(self, images: ImageEncoder) -> None:
        self._images = images

    @property
    def due(self) -> bool:
        return self._images.has_work or self._images.has_news

    def on_due(self, wake: Callable[[], None]) -> None:
        """Does nothing: the engine's own thread does this work."""

    def collect(self) -> Collected:
        if not self._images.has_news:
            return NOTHING_NEW
        ready, failed = self._images.take_done()
        return Collected(ready=[*ready, *failed], failed=failed)

    def is_awaited(self, sequence: Sequence) -> bool:
        return self._images.is_awaited(sequence.request_id)

    def drop(self, sequence: Sequence, last: bool) -> None:
        if last:
            self._images.drop(sequence.request_id)

    def close(self, timeout: float) -> None:
        """Does nothing: embeddings are not kept on disk."""
