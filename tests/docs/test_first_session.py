"""The commands of docs/start/first-session.md run, and print what their places in it promise."""

from __future__ import annotations

import pytest
from support.paths import ROOT
from support.transcript import Transcript

pytestmark = pytest.mark.system

PAGE = ROOT / "docs" / "start" / "first-session.md"


async def test_the_commands_of_the_first_session_run() -> None:
    page = PAGE.read_text()
    transcript = Transcript()
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
