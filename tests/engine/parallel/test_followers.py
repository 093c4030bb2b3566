"""Rank 0's side of the other ranks, which small scripts play."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.paths import ROOT

# A rank 0 that meets its ranks; each of them is a script. ``sys.path`` comes from this process.
RANK_0 = """
import sys, time
from pathlib import Path
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.parallel import followers
from chairlift.engine.parallel.place import local_places

followers.command = lambda place, main: [sys.executable, "-c", RANKS[place.rank - 1]]
followers.START_GRACE = GRACE
config = EngineConfig(tensor_parallel_size=1 + len(RANKS))
source = ModelSource("m", "directory", Path("."))
places = local_places(1 + len(RANKS), range(2 + len(RANKS)))
starts = [followers.StartRank(p, config, source) for p in places[1:]]
ranks = followers.Followers(starts, lambda why: print("failed:", why, flush=True))
"""
RANK = """
import os, sys
import msgspec
from chairlift.engine.parallel.followers import Failed, Report
from chairlift.engine.workers.wire import receive, send
def answer(message):
    send(sys.stdout.buffer, msgspec.msgpack.encode(message))
start = receive(sys.stdin.buffer)
"""
GOOD = RANK + "answer(Report('cpu', [7])); receive(sys.stdin.buffer); receive(sys.stdin.buffer)"


def rank_0(
    tmp_path: Path, ranks: list[str], script: str, grace: float = 0.0
) -> subprocess.CompletedProcess[str]:
    """Runs rank 0 with these ranks; ``script`` is what it does then."""
    path = tmp_path / "rank_0.py"
    path.write_text(f"RANKS, GRACE = {ranks!r}, {grace}\n{RANK_0}{textwrap.dedent(script)}")
    return subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=180,
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("answer(Failed('no such file'))", "rank 2: no such file"),
        ("answer(Report('cuda'))", "rank 2 computes on cuda and rank 0 on cpu"),
        ("print('Welcome to this host', flush=True)", "rank 2: something else prints"),
        ("send(sys.stdout.buffer, b'Welcome')", "rank 2: something else prints"),
    ],
)
def test_rank_0_learns_why_a_rank_cannot_start(tmp_path: Path, bad: str, why: str) -> None:
    script = """
    try:
        ranks.meet(followers.Report("cpu", [3]))
    except ModelError as error:
        print(error)
    ranks.close()
    """
    ended = rank_0(tmp_path, [GOOD, RANK + bad], script, grace=30.0)
    assert why in ended.stdout
    assert ended.returncode == 0, ended.stderr


def test_rank_0_ends_with_any_rank(tmp_path: Path) -> None:
    script = """
    print(ranks.meet(followers.Report("cpu", [3])), flush=True)
    ranks.serve()
    time.sleep(30)
    """
    dying = RANK + "answer(Report('cpu', [5])); receive(sys.stdin.buffer); os.abort()"
    ended = rank_0(tmp_path, [GOOD, dying], script)
    assert ended.stdout.strip() == "[[3], [7], [5]]"
    assert ended.returncode == 1
    assert "rank 2: its process was ended by signal 6" in ended.stderr


@pytest.mark.parametrize(
    ("end", "printed", "code"),
    [
        ("os.kill(os.getpid(), 9)", "", -9),
        ("os.abort()", "", 1),
        ("os._exit(255)", "rank 1: its process ended with exit code 255", 0),
    ],
)
def test_rank_0_has_no_error_to_report_if_a_signal_has_ended_a_rank_at_the_start(
    tmp_path: Path, end: str, printed: str, code: int
) -> None:
    """The server then starts all ranks again, as after a signal to rank 0."""
    script = """
    try:
        ranks.meet(followers.Report("cpu"))
    except ModelError as error:
        print(error, flush=True)
        ranks.close()
    """
    ended = rank_0(tmp_path, [RANK + end], script, grace=0.0 if code else 30.0)
    assert ended.stdout.strip() == printed
    assert ended.returncode == code
    assert ("rank 1: its process was ended by signal" in ended.stderr) == bool(code)


@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("os.abort()", 1), ("receive(fd)", 7)]
)
@pytest.mark.parametrize("serving", [False, True])
def test_a_failure_of_rank_0_is_reported_unless_a_signal_has_ended_a_rank(
    tmp_path: Path, end: str, code: int, serving: bool
) -> None:
    """Within MLX rank 0 may notice the end of a connection before the end of a process."""
    script = f"""
    ranks.meet(followers.Report("cpu"))
    {"ranks.serve()" if serving else ""}
    ranks.end_if_lost()
    ranks.close()
    sys.exit(7)
    """
    rank = RANK + f"fd = sys.stdin.buffer\nanswer(Report('cpu')); receive(fd); {end}"
    # While it serves its ranks, rank 0 waits only until one has ended; else for all of this time.
    grace = 0.5 if code == 7 else 30.0 if serving else 3.0
    assert rank_0(tmp_path, [GOOD, rank], script, grace=grace).returncode == code


def test_a_failure_beside_a_killed_rank_is_not_blamed(tmp_path: Path) -> None:
    """A rank that is left alone in a sum of several fails, too."""
    joined = RANK + "answer(Report('cpu')); receive(sys.stdin.buffer); "
    ranks = [joined + "answer(Failed('RuntimeError'))", joined + "os.kill(os.getpid(), 9)"]
    script = """
    ranks.meet(followers.Report("cpu"))
    time.sleep(30)
    """
    ended = rank_0(tmp_path, ranks, script, grace=1.0)
    assert ended.stdout == ""
    assert ended.returncode == -9


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("answer(Failed('too big'))", "failed: rank 1: too big"),
        ("os._exit(255)", "failed: rank 1: its process ended with exit code 255"),
        ("os.abort()", ""),
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_rank_that_fails_while_rank_0_is_busy_is_explained(
    tmp_path: Path, end: str, why: str, joined: bool
) -> None:
    """Rank 0 may import, or wait within MLX for that rank, and so cannot do it itself."""
    script = f"""
    if {joined}:
        ranks.meet(followers.Report("cpu"))
    time.sleep(30)
    """
    join = "answer(Report('cpu')); receive(sys.stdin.buffer); " if joined else ""
    ended = rank_0(tmp_path, [RANK + join + end], script)
    assert ended.stdout.strip() == why
    assert ended.returncode == 1
