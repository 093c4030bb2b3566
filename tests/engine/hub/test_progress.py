"""Progress of downloads and loading: a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.hub import progress
from chairlift.engine.hub.progress import LineProgress, bar_class, byte_bar, reach
from chairlift.engine.logs.setup import LogFormat, log_handler


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def logging_to(*handlers: logging.Handler, level: str = "INFO") -> Iterator[None]:
    """Gives the root logger these handlers only; pytest's own are among the others."""
    root = logging.getLogger()
    before = root.handlers, root.level
    root.handlers = list(handlers)
    root.setLevel(level)
    try:
        yield
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])


@given(total=st.integers(1, 2**50), steps=st.lists(st.integers(-(2**51), 2**51), max_size=300))
@settings(deadline=None)
def test_any_progress_is_two_lines_in_a_pipe(total: int, steps: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch, logging_to():
        patch.setattr(sys, "stderr", written := io.StringIO())
        with byte_bar("loading weights", total) as bar:
            before = 0
            for step in steps:
                reach(bar, step)
                assert before <= bar.n <= total
                before = int(bar.n)
            reach(bar, total)
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("loading weights: ") for line in lines)
    assert "\r" not in written.getvalue()


def test_a_long_download_has_a_line_every_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with logging_to(), byte_bar("weights", 5) as bar:
        for done in range(1, 6):
            reach(bar, done)
    assert len(written.getvalue().splitlines()) >= 5


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to():
        monkeypatch.setattr(sys, "stderr", _Terminal())
        assert bar_class() is not LineProgress
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert bar_class() is LineProgress


@pytest.mark.parametrize(
    ("log_format", "level", "bar"),
    [("text", "INFO", True), ("text", "WARNING", False), ("json", "INFO", False)],
)
def test_a_bar_does_not_disturb_a_structured_or_quiet_log(
    log_format: LogFormat, level: str, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with logging_to(log_handler(log_format, "api", terminal), level=level):
        assert (bar_class() is not LineProgress) == bar
        if bar:
            return
        with byte_bar("weights", 5) as shown:
            reach(shown, 5)
    lines = terminal.getvalue().splitlines()
    assert len(lines) == (2 if level == "INFO" else 0)
    assert all(json.loads(line)["message"].startswith("weights: ") for line in lines)


def test_lines_have_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    """A second bar of the hub's client moves the cursor up and down."""
    lines = progress._Lines()
    caplog.set_level(logging.INFO)
    for text in ("\x1b[A", "\n\n\x1b[A\x1b[2K", "\r\x1b[Afirst: 3 %", "\n"):
        lines.write(text)
    assert caplog.messages == ["first: 3 %"]
