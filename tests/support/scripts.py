"""Runs Python scripts, each unchanged and in a process of its own, forked after common imports.

``python tests/support/scripts.py LIBRARY,... AT_ONCE FILE...`` runs the files, so many at a time,
after these imports. Beside each it writes what the script prints, to FILE.out and FILE.err, and its
exit code, to FILE.code.
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

# Half of the time of a client's short script is the import of one of these. `openai` imports its
# resources only when they are used.
CLIENTS = ("openai", "openai.resources", "anthropic", "pydantic")
# Most of the time of a server that soon ends with an error.
SERVER = ("chairlift.api.cli.serve", "mlx_lm", "chairlift.api.server.serve")
_SECONDS = 300


def run_scripts(
    files: Sequence[Path], at_once: int, libraries: Sequence[str] = CLIENTS
) -> dict[Path, subprocess.CompletedProcess[str]]:
    """Runs the files, ``at_once`` of them at a time; a script is killed after five minutes."""
    command = [sys.executable, __file__, ",".join(libraries), str(at_once), *map(str, files)]
    # As in the server: otherwise transformers advises users to install PyTorch.
    subprocess.run(
        command, env={**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}, check=True
    )
    return {
        file: subprocess.CompletedProcess(
            [sys.executable, str(file)],
            int(file.with_suffix(".code").read_text()),
            file.with_suffix(".out").read_text(),
            file.with_suffix(".err").read_text(),
        )
        for file in files
    }


def _main(libraries: Sequence[str], at_once: int, files: Sequence[Path]) -> None:
    gc.disable()  # imports leave no garbage; looking for some takes a sixth of their time
    for library in libraries:
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
    _main(sys.argv[1].split(","), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
