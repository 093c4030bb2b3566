"""Makes text from a model or a server safe to show in a terminal."""

from __future__ import annotations

import re

# All control characters but newline and tab: without ESC and the C1 codes no text can move the
# cursor, change the title or the clipboard, or make the terminal type.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns ``text`` without control characters, except newlines and tabs.

    Lone surrogates, which no terminal can show, become question marks.
    """
    return encodable(_CONTROL.sub("", text))


def encodable(text: str) -> str:
    """Replaces lone surrogates by question marks, so that UTF-8 can encode ``text``."""
    return text.encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Returns ``text`` as one printable line."""
    return " ".join(printable(text).split())
