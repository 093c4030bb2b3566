"""Shows the progress of downloads and of loading: a bar on a terminal, else a few plain lines."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any, Never

from tqdm.asyncio import tqdm

from chairlift.engine.logs.setup import TextFormatter

logger = logging.getLogger(__name__)

# Time between two plain lines.
LINE_SECONDS = 30.0
# What tqdm writes to move the cursor.
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class _Lines:
    """A file for tqdm: writes each text as a line."""

    def write(self, text: str) -> None:
        line = _CURSOR.sub("", text).strip()
        if not line:
            return
        if logging.getLogger().handlers:
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Does nothing; each line is flushed."""


if TYPE_CHECKING:
    Bar = tqdm[Never]
else:  # at run time the class takes no parameters
    Bar = tqdm


class LineProgress(Bar):
    """A tqdm that writes plain lines: the first, the last, and one every LINE_SECONDS.

    The lines go to the log if the process has one, else to stderr. Only bars of bytes write lines;
    the hub's client also makes one that counts files.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # The hub's client also passes its own name for a bar, which tqdm does not know.
        options.pop("name", None)
        options |= {
            "file": _Lines(),
            "mininterval": LINE_SECONDS,
            "maxinterval": LINE_SECONDS,
            "bar_format": "{desc}: {n_fmt} of {total_fmt}{unit}, {elapsed}",
            "disable": options.get("unit") != "B",
        }
        super().__init__(*args, **options)


def bar_class() -> type[Bar]:
    """The class of bars for stderr: tqdm's on a terminal, unless the log there has no text."""
    handlers = logging.getLogger().handlers
    is_text = all(isinstance(each.formatter, TextFormatter) for each in handlers)
    shown = not handlers or (is_text and logger.isEnabledFor(logging.INFO))
    return tqdm if shown and sys.stderr.isatty() else LineProgress


def byte_bar(title: str, total: int) -> Bar:
    """A bar that counts bytes; a context manager, as tqdm's bars are."""
    return bar_class()(desc=title, total=total, unit="B", unit_scale=True)


def reach(bar: Bar, done: int) -> None:
    """Moves a bar to ``done``, never back and never beyond its total."""
    bar.update(max(0, min(done, int(bar.total or 0)) - int(bar.n)))
