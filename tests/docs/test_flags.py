"""Every flag that the documentation names is one of a command, or of a program listed here."""

from __future__ import annotations

import argparse
import re

import pytest
from support.paths import ROOT

from chairlift.api.cli.main import COMMANDS, build_parser

DOCS = ROOT / "docs"
# The notes keep the flags of their time.
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if DOCS / "notes" not in page.parents
]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
BENCHMARKS = {"--minutes", "--out", "--rate", "--requests", "--restart", "--size", "--step-ms"}
BENCHMARKS |= {"--decode", "--kv-gb", "--only", "--pages", "--speculative", "--trace"}
BENCHMARKS |= {"--adapters", "--output-tokens", "--prompt-tokens", "--server"}
PIP = {"--force-reinstall", "--no-cache-dir", "--no-deps", "--yes"}
OTHERS = {"--build-arg", "--head", "--init", "--now", "--signal", "--stop-timeout", "--tasks"}


def commands_flags() -> set[str]:
    """The flags of all commands of ``chairlift``."""
    parser = build_parser(COMMANDS)
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parsers = [parser, *commands.choices.values()]
    return {flag for p in parsers for action in p._actions for flag in action.option_strings}


@pytest.fixture(scope="module")
def known() -> set[str]:
    return commands_flags() | BENCHMARKS | PIP | OTHERS


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_exists(page: str, known: set[str]) -> None:
    assert set(FLAG.findall((ROOT / page).read_text())) - known == set()
