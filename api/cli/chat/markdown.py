"""Renders a reply's markdown with rich while it streams.

A block that can no longer change is printed once and scrolls away like other output. Only the last
block is redrawn, so a long reply costs no more per token than a short one.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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


class _Blocks(NamedTuple):
    complete: str
    last: str


def split_blocks(text: str) -> _Blocks:
    """Splits markdown before its last block, which more text may still change.

    The line that is being written counts to the block before it, because its first characters do
    not tell its kind: "*" begins a list or bold text.
    """
    lines = text.split("\n")
    tokens = _PARSER.parse("\n".join(lines[:-1]))
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    if len(starts) < 2:
        return _Blocks("", text)
    first = starts[-1]
    return _Blocks("\n".join(lines[:first]), "\n".join(lines[first:]))


def render(text: str) -> Markdown:
    """Markdown without links that hide their address."""
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = _PARSER.parse(text)
    return markdown


class _Tail:
    """The last lines of a renderable, as many as the terminal can redraw."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options, pad=False)
        for index, line in enumerate(lines[-max(1, console.height - 2) :]):
            if index:
                yield Segment.line()
            yield from line


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
            self._live.update(_Tail(self._block(self._text)), refresh=True)

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
        if self._text:
            self._print(self._text)
        self._text = ""
        self._is_drawn = True

    def _print(self, text: str) -> None:
        self._console.print(self._block(text))
        self._has_blocks = True

    def _block(self, text: str) -> RenderableType:
        block = render(text)
        return Group(Text(), block) if self._has_blocks else block
