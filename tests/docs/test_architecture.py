"""Every path that the architecture page names exists, and its map has all packages."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

PAGES = ("architecture.md", *(f"explanation/{name}.md" for name in ("api-process", "step")))
FOLDERS = ("api", "cache", "engine", "loadtest", "metrics", "scheduler", "tests", "src")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")


@pytest.mark.parametrize("name", PAGES)
def test_every_path_exists(name: str) -> None:
    paths = PATH.findall((ROOT / "docs" / name).read_text())
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_map_has_every_package() -> None:
    named = set(PATH.findall((ROOT / "docs" / "architecture.md").read_text()))
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("api", "engine")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    assert packages <= named
