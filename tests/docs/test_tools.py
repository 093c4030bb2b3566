"""Every module that can be run has a ``--help`` with text, which does nothing else."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import chairlift

_ROOT = Path(chairlift.__file__).parent
_RUN = 'if __name__ == "__main__":'


def _tools() -> list[str]:
    """The names of all modules that do something when they are run."""
    files = [
        path
        for package in sorted(_ROOT.iterdir())
        if package.is_dir()
        for path in sorted(package.resolve().rglob("*.py"))
        if _RUN in path.read_text(encoding="utf-8")
    ]
    names = []
    for path in files:
        parts = path.relative_to(_ROOT.resolve().parents[1]).with_suffix("").parts
        names.append(".".join(("chairlift", *parts)).removesuffix(".__main__"))
    return names


TOOLS = _tools()


def test_the_scan_finds_the_tools() -> None:
    assert {
        "chairlift.engine",
        "chairlift.engine.device.join_cost",
        "chairlift.loadtest.faults",
    } <= {*TOOLS}


@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_text_and_nothing_else(
    tool: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    # Another test may have imported the module already; it is run again all the same.
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(tool, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    usage, description, *options = shown.out.split("\n\n")
    assert usage.startswith("usage: ")
    assert len(description.split()) >= 6, description
    for flag, text in _options("\n".join(options)):
        assert re.search(r"[a-z]{3,} [a-z]|\w{4,}", re.sub(r"\(?default:? .*", "", text)), flag
    assert list(tmp_path.iterdir()) == []


def _options(text: str) -> list[tuple[str, str]]:
    """The flags of argparse's help, each with its text."""
    entries = re.split(r"\n  (?=-)", "\n" + text)
    found = []
    for entry in entries[1:]:
        head, *rest = entry.split("\n")
        flag, _, first = head.partition("  ")
        # Text that belongs to the entry is indented; an empty line or a heading ends it.
        found.append((flag, " ".join([first, *(line for line in rest if line.startswith("   "))])))
    return found
