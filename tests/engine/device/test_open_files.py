"""The import of mlx-lm for servers. ``hub.test_stored_models`` tests the limit of open files."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

_IMPORT = """
from chairlift.engine.device.open_files import import_mlx_lm
import_mlx_lm()
import httpx
import httpx._main
print(httpx.main is httpx._main.main, httpx.Client.__name__)
"""


@pytest.mark.skipif(
    int(version("huggingface_hub").split(".")[0]) > 1, reason="this hub does not import httpx"
)
def test_httpx_comes_without_its_command_line_client() -> None:
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False Client\n"


_HUB = """
import sys
from chairlift.engine.device.open_files import import_mlx_lm
import_mlx_lm()
client = "huggingface_hub.hf_api"
print(client in sys.modules)
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx_lm.utils import snapshot_download
try:
    snapshot_download("org/none", local_files_only=True)
except LocalEntryNotFoundError:
    print(client in sys.modules)
import huggingface_hub
from transformers.utils import hub
print(isinstance(hub.HfApi(), huggingface_hub.HfApi))
print(hub.ModelCard.load == huggingface_hub.ModelCard.load)
print(huggingface_hub.snapshot_download.__module__)
"""


def test_the_hubs_client_is_imported_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _HUB], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("False", "True", "True", "True"),
        "huggingface_hub._snapshot_download",
    ]
