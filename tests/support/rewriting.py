"""Shares pytest's rewriting of assertions between the processes of a run.

The first run after a change of all files, such as a fresh checkout, spends 6 s on it in each
process that collects them; later runs find the compiled code beside the files.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Writes the compiled code of every n-th test file, where n processes begin together.

    When this process comes to the other files, the others have written them. Where pytest's
    internals are others than in version 8.3 to 9.2, each process rewrites all of them itself.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if not worker.isdigit() or sys.dont_write_bytecode:
        return
    named = [Path(argument.partition("::")[0]) for argument in config.args]
    files = sorted(file for path in named for file in path.rglob("test_*.py"))
    with suppress(AttributeError, KeyError, TypeError):
        for file in files[int(worker) :: count]:
            _write(file, config)


def _write(file: Path, config: pytest.Config) -> None:
    folder = rewrite.get_cache_dir(file)
    compiled = folder / (file.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
