"""The sections of the guides to clients, and the blocks of code in pages of the documentation."""

from __future__ import annotations

import re

from support.paths import ROOT

ADDRESS = "http://127.0.0.1:8000"
CLIENTS = ROOT / "docs" / "guides" / "clients"
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.MULTILINE)
SECTIONS = {
    name: text
    for page in sorted(CLIENTS.iterdir())
    for name, text in _SECTION.findall(page.read_text(encoding="utf-8"))
}


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code of a text in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
