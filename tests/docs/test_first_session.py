"""The commands of docs/start/first-session.md run, and print what their places in it promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import write_tiny_default_gguf
from support.paths import ROOT
from support.transcript import Transcript

pytestmark = pytest.mark.system

PAGE = ROOT / "docs" / "start" / "first-session.md"


async def test_the_commands_of_the_first_session_run(tmp_path: Path) -> None:
    """The replies are a tiny model's, because nothing depends on their words."""
    page = PAGE.read_text()
    write_tiny_default_gguf(tmp_path / "tiny.gguf")
    transcript = Transcript(tmp_path / "tiny.gguf")
    again = await transcript.run(page)
    commands = [command for command, _ in transcript.outputs]
    shown = [line[2:] for line in page.splitlines() if line.startswith(("$ ", "> "))]
    # The command "chairlift chat" is run by its lines.
    assert [command.splitlines()[0] for command in commands] == [
        line for line in shown if line != "chairlift chat"
    ]
    assert all(output.strip() for command, output in transcript.outputs if command != "/exit")
    assert [line for line in again.splitlines() if line.startswith(("$ ", "> "))] == [
        f"{mark}{line}"
        for mark, line in ((line[:2], line[2:]) for line in page.splitlines())
        if mark in ("$ ", "> ")
    ]
    assert not any("error: " in output for _, output in transcript.outputs)
