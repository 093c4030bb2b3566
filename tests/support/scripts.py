"""Runs Python scripts, each unchanged and in a process of its own, forked after common imports.

``python tests/support/scripts.py AT_ONCE FILE...`` runs the files, so many at a time. Beside each
it writes what the script prints, to FILE.out and FILE.err, and its exit code, to FILE.code.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

# Half of a short script's time is the import of one of these. `openai` imports its resources only
# when they are used.
_LIBRARIES = ("openai", "openai.resources", "anthropic", "pydantic")
_SECONDS = 300


def run_scripts(
    files: Sequence[Path], at_once: int
) -> dict[Path, subprocess.CompletedProcess[str]]:
    """Runs the files, ``at_once`` of them at a time; a script is killed after five minutes."""
    subprocess.run([sys.executable, __file__, str(at_once), *map(str, files)], check=True)
    return {
        file: subprocess.CompletedProcess(
            [sys.executable, str(file)],
            int(file.with_suffix(".code").read_text()),
            file.with_suffix(".out").read_text(),
            file.with_suffix(".err").read_text(),
        )
        for file in files
    }


def _main(at_once: int, files: Sequence[Path]) -> None:
    gc.disable()  # imports leave no garbage; looking for some takes a sixth of their time
    for library in _LIBRARIES:
        import_module(library)
    gc.freeze()
    running: dict[int, Path] = {}
    for file in files:
        if len(running) == at_once:
            _wait_for_one(running)
        child = os.fork()
        if child == 0:
            _become(file)
            return
        running[child] = file
    while running:
        _wait_for_one(running)


def _become(file: Path) -> None:
    """Runs a script as ``python FILE`` would. An exception that it raises ends this process."""
    signal.alarm(_SECONDS)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        with file.with_suffix(suffix).open("wb") as output:
            os.dup2(output.fileno(), descriptor)
    sys.argv = [str(file)]
    sys.path[0] = str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def _wait_for_one(running: dict[int, Path]) -> None:
    child, status = os.wait()
    running.pop(child).with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
