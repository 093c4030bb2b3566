"""Fetches that were killed are resumed, and leave what others have begun."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from support.engine.fake_hub import Hub, serving
from support.engine.fetches import COMMAND, FILES, NAME, STEP, WEIGHTS, environment, run_chairlift


def stalled(
    hub: Hub, here: dict[str, str], name: str = "model.safetensors", model: str = NAME
) -> tuple[subprocess.Popen[bytes], Path]:
    """Begins a fetch that stops when half of a file was sent; returns it and the partial file."""
    blobs = Path(here["HF_HOME"], "hub", "models--some-org--some-model", "blobs")
    before = set(blobs.glob("*"))
    hub.stalls.add(name)
    hub.half_sent.clear()
    process = subprocess.Popen(
        [*COMMAND, "fetch", model], env=os.environ | here, stderr=subprocess.DEVNULL
    )
    assert hub.half_sent.wait(60)
    deadline = time.monotonic() + 180
    while not (
        left := [new for new in set(blobs.glob("*")) - before if new.stat().st_size >= STEP]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, left[0]


def killed_midway(hub: Hub, here: dict[str, str]) -> Path:
    """Kills a fetch when half of the weights were sent; returns the partial file."""
    process, partial = stalled(hub, here)
    process.kill()
    process.wait()
    hub.downloads.clear()
    return partial


@pytest.mark.slow
def test_a_fetch_keeps_what_others_have_begun(tmp_path: Path) -> None:
    files = {"m.Q4_0.gguf": WEIGHTS, "m.Q8_0.gguf": bytes(reversed(WEIGHTS))}
    with serving(Hub(NAME, files)) as hub:
        here = environment(hub, tmp_path)
        other, partial = stalled(hub, here, "m.Q4_0.gguf", f"{NAME}:Q4_0")
        assert run_chairlift("fetch", f"{NAME}:Q8_0", **here).returncode == 0
        assert partial.exists()
        # A new version without that file, which the other process still downloads.
        newer = WEIGHTS[::2] * 2
        hub.files, hub.commit = {"m.Q8_0.gguf": newer}, "d" * 40
        assert run_chairlift("fetch", f"{NAME}:Q8_0", **here).returncode == 0
        assert partial.exists()
        other.kill()
        other.wait()
        assert run_chairlift("fetch", f"{NAME}:Q8_0", **here).returncode == 0
        assert not partial.exists()


@pytest.mark.slow
def test_a_killed_fetch_is_resumed_by_the_next_run(tmp_path: Path) -> None:
    with serving(Hub(NAME, FILES)) as hub:
        here = environment(hub, tmp_path)
        partial = killed_midway(hub, here)
        done = run_chairlift("fetch", NAME, **here)
        assert done.returncode == 0, done.stderr
        weights = Path(done.stdout.strip()) / "model.safetensors"
        assert weights.read_bytes() == WEIGHTS
        assert hub.ranges == [f"bytes={STEP}-"]
        assert hub.downloads == ["model.safetensors", "config.json"]
        assert weights.is_symlink()
        assert not partial.exists()


@pytest.mark.slow
def test_partial_files_of_a_killed_fetch_are_checked(tmp_path: Path) -> None:
    with serving(Hub(NAME, FILES)) as hub:
        here = environment(hub, tmp_path)
        partial = killed_midway(hub, here)
        # A new version of the model: no bytes of the old one are used.
        newer = bytes(reversed(WEIGHTS))
        hub.files, hub.commit = {**FILES, "model.safetensors": newer}, "d" * 40
        again = killed_midway(hub, here)
        assert again != partial
        with again.open("r+b") as file:
            file.write(b"damaged")
        done = run_chairlift("fetch", NAME, **here)
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip())
        assert path.name == hub.commit
        assert (path / "model.safetensors").read_bytes() == newer
        assert hub.ranges == [f"bytes={STEP}-"]
        assert "of an earlier run is damaged, fetched again" in done.stderr
        assert not partial.exists()
        assert not again.exists()
