"""A wheel, built from the sdist as `make dist` does it, is complete, and so is its description."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.system

FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE")
PACKAGES = ("api", "cache", "engine", "loadtest", "metrics", "scheduler")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist and a wheel of the checkout."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, "docs", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for path in (*ROOT.glob("*.md"), *map(ROOT.joinpath, FILES)):
        shutil.copy(path, source)
    # It downloads setuptools, as `make dist` does.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder / "dist", source],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_the_wheel_has_every_module_and_data_file(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    packaged = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"chairlift/{path.relative_to(ROOT).as_posix()}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix == ".py" or ("ui" in path.parts and path.is_file())
    }
    expected |= {"chairlift/metrics/grafana.json", "chairlift/metrics/alerts.yml"}
    assert {name for name in expected if "__pycache__" not in name} <= packaged


def test_the_description_names_files_of_the_sdist_and_has_no_relative_links(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        description = files.read(name).decode().partition("\n\n")[2]
    assert description.startswith("# Chairlift\n")
    assert set(re.findall(r"\]\((?:https?:)?", description)) == {"](https:"}
    paths = re.findall(r"\(`([\w./-]+)`\)", description)
    assert "docs/start/quickstart.md" in paths
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packaged = {name.partition("/")[2] for name in archive.getnames()}
    assert set(paths) <= packaged
    assert "docs/deploy/keys.toml" not in packaged
