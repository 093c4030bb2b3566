"""The import of mlx-lm for servers. ``hub.test_stored_models`` tests the limit of open files."""

from __future__ import annotations

import subprocess
import sys

_IMPORT = """
from chairlift.engine.device.open_files import import_mlx_lm
import_mlx_lm()
import httpx
import httpx._main
print(httpx.main is httpx._main.main, httpx.Client.__name__)
"""


def test_httpx_comes_without_its_command_line_client() -> None:
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False Client\n"
