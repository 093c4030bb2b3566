"""Rank 0 of a measured engine: it starts the others, which make the same engines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.parallel.followers import Followers, Report, StartRank, Stop
from chairlift.engine.parallel.journal import Broadcast
from chairlift.engine.parallel.place import choose_device, local_places, reserve_ports

if TYPE_CHECKING:
    from chairlift.engine.parallel.ranks import Group

_FLAG = "--tensor-parallel-size"
_RANK = "chairlift.loadtest.engine_bench.rank"


def tensor_parallel_size(arguments: Sequence[str]) -> int:
    """The number of ranks of this program, which has to be known before MLX and thus all flags are.

    With ``--server`` the server starts the ranks.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_FLAG, type=int, default=1)
    parser.add_argument("--server", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    return 1 if options.server else int(options.tensor_parallel_size)


class Leader:
    """Rank 0 of ``size``. Make it before MLX is imported.

    Args:
        arguments: of this program; the other ranks get them, too.
    """

    def __init__(self, size: int, arguments: Sequence[str]) -> None:
        self._ports = reserve_ports(size)
        places = local_places(size, self._ports.numbers)
        config = EngineConfig(tensor_parallel_size=size)
        source = ModelSource("random weights", "directory", Path())
        starts = [StartRank(place, config, source) for place in places[1:]]
        self.place = places[0]
        self.followers = Followers(starts, main=(_RANK, *arguments))
        self._journal = Broadcast(self.followers.send)
        choose_device(self.place)

    def join(self) -> Group:
        """Joins the other ranks."""
        from chairlift.engine.parallel.ranks import join_ranks

        group = join_ranks(self.place, self.followers.meet, self._journal)
        self.followers.serve()
        return group

    def end_engine(self, peak: int) -> list[int]:
        """Ends the present engine on all ranks; returns the peak of each rank's memory in bytes."""
        from chairlift.engine.device import profile

        self._journal.flush()  # the next engine must not learn from this one
        self.followers.send(Stop())
        report = Report(profile.current().kind, [peak])
        return [numbers[0] for numbers in self.followers.gather(report)]
