"""The sections of the cookbook, and the blocks of code in pages of the documentation."""

from __future__ import annotations

import re

from support.paths import ROOT

ADDRESS = "http://127.0.0.1:8000"
_PAGE = (ROOT / "docs" / "guides" / "cookbook.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", _PAGE, re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code of a text in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
