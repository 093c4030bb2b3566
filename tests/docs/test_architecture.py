"""Paths and commands that the documentation names exist, and the architecture map is complete."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

DOCS = ROOT / "docs"
# The notes keep the names of their time.
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if DOCS / "notes" not in page.parents
]
FOLDERS = ("api", "cache", "docs", "engine", "loadtest", "metrics", "scheduler", "tests", "src")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
COMMAND = re.compile(r"python -m chairlift\.(\w+(?:\.\w+)*)")
# Its user writes it (docs/guides/deployment.md).
WRITTEN_LATER = {"docs/deploy/keys.toml"}


@pytest.mark.parametrize("name", PAGES)
def test_every_path_exists(name: str) -> None:
    paths = set(PATH.findall((ROOT / name).read_text())) - WRITTEN_LATER
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_module_that_is_run_exists(name: str) -> None:
    modules = [ROOT.joinpath(*m.split(".")) for m in COMMAND.findall((ROOT / name).read_text())]
    files = [(module.with_suffix(".py"), module / "__main__.py") for module in modules]
    assert [pair for pair in files if not any(file.exists() for file in pair)] == []


def test_the_architecture_page_answers_the_five_questions_by_paths() -> None:
    section = (DOCS / "architecture.md").read_text().partition("## Five questions")[2]
    answers = [line for line in section.partition("\n## ")[0].splitlines() if "?" in line]
    assert len(answers) == 5
    assert all(PATH.search(line) for line in answers)


def test_the_map_has_every_package() -> None:
    named = set(PATH.findall((DOCS / "architecture.md").read_text()))
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("api", "cache", "engine", "scheduler")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    assert packages <= named
