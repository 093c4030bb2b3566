"""Tools: their progress, which in a pipe is a line every half minute and at the end; Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from chairlift.loadtest import compare, null, prefix, schemas, structured
from chairlift.loadtest.bench import progress
from chairlift.loadtest.bench.metrics import compute_metrics
from chairlift.loadtest.bench.progress import Progress
from chairlift.loadtest.comparison import ServerResult


async def _run(count: int, seconds: float) -> None:
    async with Progress(count, "bench") as shown:
        for _ in range(count):
            await asyncio.sleep(seconds / count)
            shown.add_done()


async def test_a_short_run_is_one_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    await _run(50, 0.1)
    (line,) = written.getvalue().splitlines()
    assert line.startswith("bench: 50/50 requests in 0 s, ")


async def test_a_long_run_has_a_line_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_PERIOD", 0.1)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    await _run(10, 0.5)
    lines = written.getvalue().splitlines()
    assert 2 <= len(lines) <= 7
    assert lines[-1].startswith("bench: 10/10 requests")
    assert "\r" not in written.getvalue()


def _interrupt(*values: object, **flags: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("tool", "patched", "arguments"),
    [
        (null, "ChildServer", []),
        (prefix, "_run", ["model"]),
        (schemas, "ChildServer", []),
        (structured, "ChildServer", []),
    ],
)
def test_an_interrupted_tool_says_so_in_one_line(
    tool: Any,
    patched: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, patched, _interrupt)
    monkeypatch.setattr(null.subprocess, "run", lambda *command, **options: None)
    assert tool.main(arguments) == 130
    assert capsys.readouterr().err.endswith(": interrupted\n")


def test_an_interrupted_comparison_reports_the_servers_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = ServerResult("ours", (), compute_metrics([], 1.0, {}, (50.0, 99.0)))
    results = iter([result])

    def measure(*values: object) -> ServerResult:
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    (model := tmp_path / "model.gguf").touch()
    out = tmp_path / "out.json"
    flags = ["--gguf", str(model), "--only", "ours,mlx-lm", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["compare", *flags])
    monkeypatch.setattr(compare, "_measure", measure)
    monkeypatch.setattr(compare.peers, "mlx_lm", lambda model, streams: None)
    assert compare.main() == 130
    assert json.loads(out.read_text())["servers"].keys() == {"ours"}
    assert "ours" in capsys.readouterr().out
