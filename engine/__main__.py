"""``python -m chairlift.engine``: see ``process``. Its first act is to follow its parent."""

from __future__ import annotations

import sys
from pathlib import Path

from chairlift.engine.lifeline import follow_parent


def main() -> None:
    """Takes the arguments that ``child`` gives."""
    parent, folder = sys.argv[1:]
    warning = None
    try:
        follow_parent(int(parent))
    except OSError as error:
        warning = f"this process outlives its server if it is stopped while that is killed: {error}"
    # After it: the imports take a while.
    from chairlift.engine.process import engine_process

    engine_process.main(Path(folder), warning)


if __name__ == "__main__":
    main()
