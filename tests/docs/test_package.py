"""The wheel, built from the sdist, contains every module and data file of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.system

PACKAGES = ("api", "cache", "engine", "loadtest", "metrics", "scheduler")


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The build downloads setuptools, as `make dist` does.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"chairlift/{path.relative_to(ROOT).as_posix()}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix == ".py" or path.parent.name == "ui"
    }
    expected |= {"chairlift/metrics/grafana.json", "chairlift/metrics/alerts.yml"}
    assert {name for name in expected if "__pycache__" not in name} <= packed
