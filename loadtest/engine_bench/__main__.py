"""Measures the engine; see the package."""

from __future__ import annotations

import sys

from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.cuda.graphs import set_graph_limits
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.loadtest.engine_bench.ranks import Leader, tensor_parallel_size


def main() -> int:
    """Starts further ranks if there are to be any, and measures."""
    load_fast_blas()
    size = tensor_parallel_size(sys.argv[1:])
    set_graph_limits(size)
    leader = Leader(size, sys.argv[1:]) if size > 1 else None
    # These imports load MLX, which then sees only the device of this rank.
    import_mlx_lm()
    from chairlift.loadtest.engine_bench.run import run

    try:
        return run(sys.argv[1:], leader)
    except KeyboardInterrupt:
        print("engine_bench: interrupted", file=sys.stderr)
        return 130
    finally:
        if leader is not None:
            leader.followers.close()


if __name__ == "__main__":
    sys.exit(main())
