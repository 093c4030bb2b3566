"""A further rank: ``python -m chairlift.loadtest.engine_bench.rank PARENT FLAGS``."""

from __future__ import annotations

import argparse
import sys

from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cuda.graphs import set_graph_limits
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.parallel.place import choose_device
from chairlift.engine.parallel.rank_pipe import RankPipe


def main() -> None:
    """Joins rank 0 and makes the same engines."""
    parser = argparse.ArgumentParser(
        description="A further rank of engine_bench, which that starts; it is of no use without.",
    )
    parser.add_argument("parent", type=int, help="rank 0's process id")
    options, arguments = parser.parse_known_args()
    pipe = RankPipe(options.parent)
    try:
        start = pipe.start()
        load_fast_blas()
        choose_device(start.place)
        set_graph_limits(start.place.size)
        import_mlx_lm()
        from chairlift.engine.parallel.ranks import join_ranks
        from chairlift.loadtest.engine_bench.run import follow_run

        follow_run(arguments, pipe, join_ranks(start.place, pipe.meet), start.place.rank)
    except Exception as error:  # of any type: rank 0 has to learn why
        pipe.fail(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
