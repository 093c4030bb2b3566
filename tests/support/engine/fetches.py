"""Commands of ``chairlift`` that fetch a model from a hub on localhost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.engine.fake_hub import Hub

NAME = "some-org/some-model"
# The hub's client resumes at a multiple of 10 MiB.
STEP = 10 << 20
WEIGHTS = bytes(range(256)) * 90_000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "README.md": b"not needed",
}


COMMAND = [
    sys.executable,
    "-c",
    "from chairlift.api.cli.main import main; raise SystemExit(main())",
]


def run_chairlift(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | environment,
    )


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "CHAIRLIFT_CACHE": str(folder / "ours"),
    }
