"""Shows a reply while it streams: as it is in a pipe, as markdown in a terminal."""

from __future__ import annotations

import os
import sys
from typing import Protocol

from chairlift.api.cli.chat.clean import encodable, printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Display(Protocol):
    """Shows one reply."""

    def add(self, text: str, is_thought: bool) -> None:
        """Adds text of the reply, or of the model's reasoning."""
        ...

    async def refresh(self) -> None:
        """Redraws what needs it from time to time, until it is cancelled."""
        ...

    def close(self) -> None:
        """Completes the output. It is called once, also after an error."""
        ...


class PlainDisplay:
    """Prints text as it arrives, without escape codes in a pipe.

    A terminal gets no control characters, and the model's reasoning dimmed; a pipe gets the reply
    unchanged and without the reasoning.
    """

    def __init__(self, on_terminal: bool) -> None:
        self._on_terminal = on_terminal
        self._has_text = False

    def add(self, text: str, is_thought: bool) -> None:
        """See Display."""
        self._has_text = True
        if is_thought:
            shown = f"{_DIM}{printable(text)}{_PLAIN}" if self._on_terminal else ""
        else:
            shown = printable(text) if self._on_terminal else encodable(text)
        print(shown, end="", flush=True)

    async def refresh(self) -> None:
        """See Display; printed text needs no redrawing."""

    def close(self) -> None:
        """See Display."""
        if self._has_text:
            print(flush=True)


def new_display(plain: bool) -> Display:
    """Returns the display of one reply on standard output; markdown if that is a terminal.

    Args:
        plain: no markdown, also in a terminal.
    """
    on_terminal = sys.stdout.isatty()
    if plain or not on_terminal or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainDisplay(on_terminal)
    from rich.console import Console

    from chairlift.api.cli.chat.markdown import MarkdownDisplay

    return MarkdownDisplay(Console())
