"""Replies in a terminal: rendered as they stream, complete, and without foreign control codes."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from chairlift.api.cli.chat.clean import one_line, printable
from chairlift.api.cli.chat.display import PlainDisplay
from chairlift.api.cli.chat.markdown import MarkdownDisplay, split_blocks

# What rich writes: colours, and in the region that it redraws, the cursor's visibility and place.
RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

CONTROLS = st.sampled_from(
    [
        *("\x1b[31m", "\x1b]52;c;eA==\x07", "\x1b]8;;x\x1b\\", "\x07", "\x9b2J", "\x1bc", "\r"),
        *(
            "\x1b[2K",
            "\x1b[1A",
            "\x0c",
            "\x00",
            "\x7f",
            "\u0085",
            "\ud800",
            "&#27;",
            "&#12;",
            "\x07",
        ),
    ]
)
MARKDOWN = st.sampled_from(
    [
        *("\n\n", "\n", "# ", "- ", "1. ", "> ", "```\n", "```python\n", "`", "**", "*", "~~"),
        *("| a | b |\n", "|---|---|\n", "[x](http://y)", "![i](http://y)", "<b>", "    ", "---\n"),
    ]
)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cf"]), max_size=12)
TEXTS = st.lists(CONTROLS | MARKDOWN | WORDS, max_size=30)


def shown(pieces: list[str], thoughts: bool = False) -> tuple[str, MarkdownDisplay]:
    """What a terminal gets if a reply arrives in ``pieces`` and is drawn after each."""
    file = io.StringIO()
    display = MarkdownDisplay(
        Console(file=file, force_terminal=True, width=60, height=10, legacy_windows=False)
    )
    for index, piece in enumerate(pieces):
        display.add(piece, thoughts and index % 3 == 0)
        display.draw()
    display.close()
    return file.getvalue(), display


def screen(output: str) -> str:
    """The lines that stay if a terminal follows rich's cursor movements."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[1A|\x1b\[2K|\r|\n)", re.sub(r"\x1b\[[?0-9;]*[mlh]", "", output)):
        match part:
            case "\x1b[1A":
                row -= 1
            case "\x1b[2K":
                lines[row] = ""
            case "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            case "\r":
                pass
            case _:
                lines[row] += part
    return "\n".join(line.rstrip() for line in lines).rstrip()


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(TEXTS, st.booleans())
def test_no_text_of_a_model_controls_the_terminal(pieces: list[str], thoughts: bool) -> None:
    output, _ = shown(pieces, thoughts)
    assert CONTROL.search(RICH.sub("", output)) is None
    # The sequences that rich may write come from rich alone: nothing depends on the model's.
    assert output == shown([printable(piece) for piece in pieces], thoughts)[0]


@settings(deadline=None, max_examples=200)
@given(TEXTS)
def test_no_text_controls_the_terminal_without_markdown(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        file = io.StringIO()
        patch.setattr("sys.stdout", file)
        display = PlainDisplay(on_terminal=True)
        for piece in pieces:
            display.add(piece, is_thought=False)
        display.close()
    assert CONTROL.search(file.getvalue()) is None
    assert CONTROL.search(one_line("".join(pieces))) is None
    assert "\n" not in one_line("".join(pieces))


@settings(deadline=None, max_examples=200)
@given(TEXTS)
def test_blocks_add_up_to_the_text(pieces: list[str]) -> None:
    text = printable("".join(pieces))
    blocks = split_blocks(text)
    assert "\n".join([*blocks.complete, blocks.last]) == text


DOCUMENT = """# Title

Some **bold** `List<String>` text with <b>HTML</b>, ![a picture](http://x/y.png).

1. one
2. two

   more of two

```python
print("x")

print("y")
```

| a | b |
|---|---|
| 1 | 2 |

[a link](http://example.org/page)
[1]: http://example.org/definition
"""


@pytest.mark.slow
@given(st.lists(st.integers(0, len(DOCUMENT)), max_size=12))
@settings(deadline=None, max_examples=60, phases=[Phase.generate])
def test_a_document_looks_the_same_however_it_is_split(cuts: list[int]) -> None:
    whole = screen(shown([DOCUMENT])[0])
    places = [0, *sorted(cuts), len(DOCUMENT)]
    pieces = [DOCUMENT[a:b] for a, b in itertools.pairwise(places)]
    assert screen(shown(pieces)[0]) == whole
    for word in ("Title", "bold", "List<String>", "<b>HTML</b>", "http://x/y.png", "2 two"):
        assert word in whole
    for word in ("more of two", 'print("y")', "http://example.org/page", "[1]:", "/definition"):
        assert word in whole


def test_thoughts_are_dimmed_and_stand_apart() -> None:
    file = io.StringIO()
    display = MarkdownDisplay(Console(file=file, force_terminal=True, width=60, height=10))
    display.add("Let me **think**", is_thought=True)
    display.add("It is *so*", is_thought=False)
    display.close()
    assert file.getvalue().startswith("\x1b[2mLet me **think**\x1b[0m\n")
    assert "\x1b[3mso\x1b[0m" in file.getvalue()


def test_a_block_longer_than_the_terminal_is_redrawn_within_it_and_printed_once() -> None:
    lines = [f"line {n}  " for n in range(100)]
    output, _ = shown([line + "\n" for line in lines])
    assert [line.strip() for line in screen(output).splitlines()] == [
        line.strip() for line in lines
    ]
    # Cursor movements up to the block's first line would leave the terminal of 10 rows.
    runs = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", output)
    assert max(run.count("1A") for run in runs) < 10
