"""Runs pip, which ends with its parent: ``python -m chairlift.engine.hub.pip_child PARENT ...``.

PARENT is the process id of the parent; the rest are pip's own arguments.
"""

from __future__ import annotations

import runpy
import sys

from chairlift.engine.workers.lifeline import follow_parent


def main() -> None:
    """Runs pip with the arguments after the first one."""
    follow_parent(int(sys.argv.pop(1)))
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
