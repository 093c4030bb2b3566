"""Runs pip, which ends with its parent: ``python -m chairlift.engine.hub.pip_child PARENT ...``."""

from __future__ import annotations

import argparse
import runpy
import sys

from chairlift.engine.workers.lifeline import follow_parent


def main() -> None:
    """Runs pip with the arguments after the first one."""
    parser = argparse.ArgumentParser(
        prog="python -m chairlift.engine.hub.pip_child",
        description="Runs pip, which ends with its parent.",
    )
    parser.add_argument("parent", type=int, help="process id of the parent")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="pip's own arguments")
    options = parser.parse_args()
    follow_parent(options.parent)
    sys.argv[1:] = options.arguments
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
