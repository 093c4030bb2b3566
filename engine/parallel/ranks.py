"""A rank among those that compute one model together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from chairlift.engine.cpu import cores
from chairlift.engine.device import profile
from chairlift.engine.errors import ModelError
from chairlift.engine.parallel.followers import Report
from chairlift.engine.parallel.journal import Journal, NoJournal
from chairlift.engine.parallel.place import Backend, RankPlace, environment
from chairlift.engine.parallel.shard import shard

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of an engine, as one of them sees them.

    Attributes:
        size: the number of ranks.
        sharing: how many of them share this rank's memory.
        journal: takes the decisions of this rank.
    """

    @property
    def size(self) -> int: ...

    @property
    def sharing(self) -> int: ...

    @property
    def journal(self) -> Journal: ...

    def shard(self, model: Any) -> None:
        """Keeps this rank's part of a model whose weights are not computed yet.

        Raises:
            UnsupportedModel: the model cannot be divided among so many ranks.
        """
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Does something, and waits until all ranks have done it.

        Raises:
            ModelError: another rank has failed; the text says which, and why.
        """
        ...

    def smallest(self, *sizes: int) -> list[int]:
        """The smallest of all ranks' values, for each of ``sizes``."""
        ...

    def agree(self, outcomes: mx.array) -> mx.array:
        """Rank 0's outcomes of sampling, ``[rows]`` int32, as an array of this rank's graph."""
        ...

    def threads(self, configured: int | None) -> int | None:
        """The fixed number of threads for products; None: as many as cores are free."""
        ...


class Alone:
    """The ``Ranks`` of an engine that has a device to itself."""

    size = sharing = 1

    def __init__(self) -> None:
        self.journal: Journal = NoJournal()

    def shard(self, model: Any) -> None: ...

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def smallest(self, *sizes: int) -> list[int]:
        return list(sizes)

    def agree(self, outcomes: mx.array) -> mx.array:
        return outcomes

    def threads(self, configured: int | None) -> int | None:
        return configured


ALONE = Alone()


class Group:
    """The ``Ranks`` of an engine with several.

    Attributes:
        device: the kind of each rank's device.

    Args:
        place: this rank's.
        group: of MLX's distributed layer.
        meet: called with numbers for the other ranks, at points to which all ranks come; returns
            those of all ranks, and raises ModelError if one of them has failed.
        journal: rank 0's.
    """

    def __init__(
        self,
        place: RankPlace,
        group: Any,
        meet: Callable[[list[int]], list[list[int]]],
        journal: Journal | None = None,
    ) -> None:
        self.size = place.size
        self.device = profile.current().kind
        self.sharing = 1 if self.device == "cuda" else place.local_size
        self.journal: Journal = NoJournal() if journal is None else journal
        self._place = place
        self._group = group
        self._meet = meet

    def shard(self, model: Any) -> None:
        shard(model, self._group)

    def together(self, work: Callable[[], T]) -> T:
        done = work()
        self._meet([])
        return done

    def smallest(self, *sizes: int) -> list[int]:
        return list(map(min, zip(*self._meet(list(sizes)), strict=True)))

    def agree(self, outcomes: mx.array) -> mx.array:
        # Zeros that depend on the logits: each rank's sums stay in the order of the model's.
        mine = outcomes if self._place.rank == 0 else outcomes * 0
        return mx.distributed.all_sum(mine, group=self._group)

    def threads(self, configured: int | None) -> int | None:
        # A sum waits for its slowest rank, so ranks on one host must not compete for its cores.
        return configured or max(1, cores.available() // self._place.local_size)


def join_ranks(
    place: RankPlace,
    meet: Callable[[Report], list[list[int]]],
    journal: Journal | None = None,
) -> Group:
    """Waits until all ranks have loaded MLX, and joins them.

    Args:
        meet: of ``Followers`` or of a ``RankPipe``.
        journal: rank 0's.

    Raises:
        ModelError: a rank has failed, has another kind of device, or cannot be reached.
    """
    device: str = profile.current().kind

    def exchange(numbers: list[int]) -> list[list[int]]:
        return meet(Report(device, numbers))

    exchange([])
    return Group(place, join(place), exchange, journal)


def join(place: RankPlace) -> Any:
    """Waits until all ranks have joined, and returns MLX's group. Call it on all at once.

    Raises:
        ModelError: MLX has no such backend here, or a rank cannot be reached.
    """
    backend: Backend = place.backend or ("nccl" if mx.cuda.is_available() else "ring")
    try:
        with environment(place, backend):
            return mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, OSError) as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"rank {place.rank} cannot join the others by {backend}: {text}"
        ) from error
