"""The process of a rank other than 0: ``python -m chairlift.engine.process.rank_process [PARENT]``.

Rank 0 starts it, on another host through ssh and then without PARENT, its process id. The process
replays rank 0's turns, and ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import TYPE_CHECKING

from chairlift.engine.logs.setup import set_up_logs
from chairlift.engine.parallel.followers import Stop
from chairlift.engine.parallel.journal import Turn
from chairlift.engine.parallel.rank_pipe import RankPipe
from chairlift.engine.process.libraries import load_libraries

if TYPE_CHECKING:
    from chairlift.engine.process.follower import Follower


def main() -> None:
    """Ties this process to rank 0, joins the other ranks, and replays until a ``Stop``."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.engine.process.rank_process",
        description="A further rank of an engine, which rank 0 starts; it is of no use without.",
    )
    parser.add_argument("parent", type=int, nargs="?", help="rank 0's process id, on its own host")
    pipe = RankPipe(parser.parse_args().parent)
    try:
        serve(pipe)
    except Exception as error:  # of any type: rank 0 has to learn why
        pipe.fail(error)
        sys.exit(1)


def serve(pipe: RankPipe) -> None:
    """Starts this rank's part of the engine, and replays turns until a ``Stop``.

    Raises:
        ChairliftError: this rank cannot start, or does not do the same as rank 0.
    """
    start = pipe.start()
    set_up_logs(start.log_level, start.log_format, f"engine-{start.place.rank}")
    libraries = load_libraries(start.place)
    # These imports load MLX, so they come after the BLAS.
    from chairlift.engine.core.background import Background
    from chairlift.engine.core.core import EngineCore
    from chairlift.engine.core.start import start_core
    from chairlift.engine.cpu.thread_count import ThreadWatch, blas_threads
    from chairlift.engine.parallel.ranks import join_ranks
    from chairlift.engine.process.follower import Follower

    ranks = join_ranks(start.place, pipe.meet)

    def make_core(background: Background) -> EngineCore:
        record = libraries.record
        core, info = start_core(start.config, start.source, record, ranks, (background,))
        record(info)
        return core

    with ThreadWatch(blas_threads(), ranks.threads(start.config.threads)):
        follower = Follower(make_core)
        gc.freeze()
        follow(pipe, follower)


def follow(pipe: RankPipe, follower: Follower) -> None:
    """Replays turns until a ``Stop``."""
    while not isinstance(turn := pipe.take(), Stop):
        assert isinstance(turn, Turn)
        follower.take(turn)


if __name__ == "__main__":
    main()
