"""``python -m chairlift.engine``: the engine process; see ``process.engine_process``."""

from __future__ import annotations

import sys
from pathlib import Path

from chairlift.engine.lifeline import follow_parent


def main() -> None:
    """Ties this process to its parent, then runs the engine. ``process.child`` gives arguments."""
    parent, folder = sys.argv[1:]
    warning = None
    try:
        follow_parent(int(parent))
    except OSError as error:
        warning = f"this process outlives its server if it is stopped while that is killed: {error}"
    # Imported only now, because the imports take a while.
    from chairlift.engine.process import engine_process

    engine_process.main(Path(folder), warning)


if __name__ == "__main__":
    main()
