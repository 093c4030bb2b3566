"""Renders a reply's markdown with rich while it streams.

A block that can no longer change is printed once and scrolls away like other output. Only the last
block is redrawn, so a long reply costs no more per token than a short one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import NamedTuple

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from chairlift.api.cli.chat.clean import printable

# Redraw at most so often, and spend at most one part in _DRAW_SHARE of the time on it.
_MIN_INTERVAL = 0.08
_DRAW_SHARE = 8

# rich leaves out HTML, the targets of images and link definitions. A reply must not lose text
# (`List<String>`), so these stay what they are in the source.
_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["strikethrough", "table"])
    .disable(["reference", "image"])
)


class Blocks(NamedTuple):
    """Markdown in blocks; only the last may still change."""

    complete: list[str]
    last: str


def split_blocks(text: str) -> Blocks:
    """Splits markdown into its top-level blocks while it is being written.

    The line that is being written counts to the last block, because its first characters do not
    tell its kind: "*" begins a list or bold text.
    """
    whole_lines, newline, line = text.rpartition("\n")
    *complete, last = _blocks(whole_lines)
    return Blocks(complete, f"{last}{newline}{line}")


def _blocks(text: str) -> list[str]:
    """The top-level blocks of ``text``, at least one; joined by newlines they are the text."""
    lines = text.split("\n")
    tokens = _PARSER.parse(text)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    places = [0, *starts[1:], len(lines)]
    return ["\n".join(lines[begin:end]) for begin, end in itertools.pairwise(places)]


class _Block:
    """One rendered block: its lines without the blank ones that rich puts around some blocks.

    Args:
        text: its markdown.
        is_first: whether no block is above it; otherwise a blank line is.
        is_cropped: whether to leave out the first lines if the terminal cannot redraw all.
    """

    def __init__(self, text: str, is_first: bool, is_cropped: bool) -> None:
        # Links do not hide their address.
        self._markdown = Markdown("", hyperlinks=False)
        self._markdown.parsed = _PARSER.parse(text)
        self._is_first = is_first
        self._is_cropped = is_cropped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        while lines and _is_blank(lines[-1]):
            lines.pop()
        begin = next((n for n, line in enumerate(lines) if not _is_blank(line)), 0)
        lines = lines[begin:] if self._is_first else [[], *lines[begin:]]
        if self._is_cropped:
            lines = lines[-max(1, console.height - 2) :]
        for index, line in enumerate(lines):
            if index:
                yield Segment.line()
            yield from line
        if not self._is_cropped:
            yield Segment.line()


def _is_blank(line: list[Segment]) -> bool:
    return not any(part.text.strip() or (part.style and part.style.bgcolor) for part in line)


class MarkdownDisplay:
    """A ``Display`` that renders the reply's markdown and dims the model's reasoning.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._text = ""  # of the last block
        self._has_blocks = False
        self._is_drawn = True
        self._in_thought = False

    def add(self, text: str, is_thought: bool) -> None:
        """See Display."""
        text = printable(text)
        if is_thought:
            self._end_markdown()
            self._in_thought = True
            self._console.print(Text(text, style="dim"), end="", soft_wrap=True)
            return
        self._end_thought()
        self._text += text
        self._is_drawn = False

    async def refresh(self) -> None:
        """See Display."""
        while True:
            begin = time.monotonic()
            self.draw()
            await asyncio.sleep(max(_MIN_INTERVAL, _DRAW_SHARE * (time.monotonic() - begin)))

    def draw(self) -> None:
        """Prints the blocks that are complete, and redraws the last one."""
        if self._is_drawn:
            return
        self._is_drawn = True
        if self._live is None:
            # It must not replace sys.stdout: the prompt of prompt_toolkit holds the real one.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        blocks = split_blocks(self._text)
        self._text = blocks.last
        with self._console:  # writes all of it at once
            if blocks.complete:
                self._live.update("", refresh=True)
                self._print(blocks.complete)
            block = _Block(self._text, is_first=not self._has_blocks, is_cropped=True)
            self._live.update(block, refresh=True)

    def close(self) -> None:
        """See Display."""
        self._end_thought()
        self._end_markdown()

    def _end_thought(self) -> None:
        if self._in_thought:
            self._in_thought = False
            self._console.print()

    def _end_markdown(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None
        if self._text.strip():
            self._print(_blocks(self._text))
        self._text = ""
        self._is_drawn = True

    def _print(self, blocks: list[str]) -> None:
        for text in blocks:
            block = _Block(text, is_first=not self._has_blocks, is_cropped=False)
            self._console.print(block, end="")
            self._has_blocks = True
