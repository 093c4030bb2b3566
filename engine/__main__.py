"""``python -m chairlift.engine``: the engine process; see ``process.engine_process``."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from chairlift.engine.workers.lifeline import follow_parent


def main() -> None:
    """Ties this process to its parent, then runs the engine. ``process.child`` gives arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.engine",
        description="The engine process of a server, which 'chairlift serve' starts; it is of no "
        "use without one.",
    )
    parser.add_argument("parent", type=int, help="the server's process id: both end together")
    parser.add_argument("folder", type=Path, help="the folder with the server's socket")
    options = parser.parse_args()
    warning = None
    try:
        follow_parent(options.parent)
    except OSError as error:
        warning = f"this process outlives its server if it is stopped while that is killed: {error}"
    # Imports leave no garbage; looking for some would take a seventh of their time. The engine
    # enables it again.
    gc.disable()
    # Imported only now, because the imports take a while.
    from chairlift.engine.process import engine_process

    engine_process.main(options.folder, warning)


if __name__ == "__main__":
    main()
