"""The command ``chairlift.scheduler.simulate``: traces, flags, and the same bytes for a seed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from chairlift.scheduler.simulate.__main__ import main
from chairlift.scheduler.simulate.simulation import Simulation
from chairlift.scheduler.simulate.trace import TraceError, TraceRequest, read_trace


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "ours.jsonl",
            '{"arrival": 7, "prompt_tokens": 10, "output_tokens": 2}\n\n'
            '{"arrival": 8.5, "prompt_tokens": 20, "output_tokens": 1}\n',
        ),
        ("ours.csv", "arrival,prompt_tokens,output_tokens\n7,10,2\n8.5,20,1\n"),
        (
            "mooncake.jsonl",
            '{"timestamp": 27000, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
            '{"timestamp": 28500, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n',
        ),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
            "2023-11-16 18:17:03.9799600,10,2\r\n2023-11-16 18:17:05.4799600,20,1\r\n",
        ),
        (
            "azure2024.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 00:00:01.509930+00:00,20,1\n",
        ),
    ],
)
def test_traces_of_each_format_are_read(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 10, 2, 2)
    assert second._replace(arrival=0.0) == TraceRequest(0.0, 20, 1, 1)
    assert second.arrival == pytest.approx(1.5)
    assert main(["--trace", str(path), "--machine", "cpu-smollm2-135m"]) == 0
    assert "2 served" in capsys.readouterr().out


def test_our_own_trace_format_has_users_priorities_and_max_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"arrival": 0, "prompt_tokens": 10, "output_tokens": 2}
    more = {"max_tokens": 9, "user": "ann", "priority": -2}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | more)}\n")
    assert list(read_trace(path)) == [
        TraceRequest(0.0, 10, 2, 2),
        TraceRequest(0.0, 10, 2, 9, "ann", -2),
    ]


@pytest.mark.parametrize("start", ["\ufeff", "\n \n", "\ufeff\n"])
@pytest.mark.parametrize(
    "rows",
    [
        '{"arrival": 7, "prompt_tokens": 10, "output_tokens": 2}\n',
        "arrival,prompt_tokens,output_tokens\r\n7,10,2\r\n",
    ],
)
def test_a_trace_may_begin_with_a_mark_or_empty_lines(
    tmp_path: Path, start: str, rows: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes((start + rows).encode())
    assert list(read_trace(path)) == [TraceRequest(0.0, 10, 2, 2)]


GOOD = '{"arrival": 7, "prompt_tokens": 10, "output_tokens": 2}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "{7}\n", "line 2: not JSON"),
        (GOOD + "7\n", "line 2: not a JSON object"),
        (GOOD + '{"prompt_tokens": 10}\n', "line 2: no column of arrivals"),
        (GOOD + GOOD.replace("7", "6"), "line 2: arrives before"),
        (GOOD.replace("7", '"soon"'), "line 1: arrival must be a time, not 'soon'"),
        (GOOD.replace("7", "NaN"), "line 1: arrival must be a time, not nan"),
        (GOOD.replace("10", "0"), "line 1: prompt_tokens must be a whole number from 1 to"),
        (GOOD.replace("10", "1.5"), "line 1: prompt_tokens must be a whole number"),
        (GOOD.replace("2}", '2, "max_tokens": 1}'), "line 1: output of 2 tokens, but max_tokens"),
        (GOOD.replace("2}", '2, "priority": "high"}'), "line 1: priority must be a whole number"),
        (GOOD.replace("10", "3000000000"), "line 1: prompt_tokens must be a whole number from 1"),
        (GOOD.replace("2}", f'2, "priority": {10**400}}}'), "line 1: priority must be a whole"),
        (GOOD + GOOD.replace("7", "1e300"), "line 2: arrival must be a time, not 1e.300"),
        (GOOD + GOOD.replace("7", "1e12"), "line 2: arrives more than ten years after"),
        ("\n" + GOOD + "{7}\n", "line 3: not JSON"),
        ("\n\narrival,prompt_tokens\n1,2\n", "line 4: no output_tokens"),
        ("arrival,prompt_tokens\n1,2\n", "line 2: no output_tokens"),
        ("arrival,prompt_tokens,output_tokens\n1,2,3\n2,x,3\n", "line 3: prompt_tokens must be"),
        ('arrival,prompt_tokens,output_tokens\n1,"2\n', "line 2: no output_tokens"),
    ],
)
def test_an_invalid_line_is_named(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))
    assert main(["--trace", str(path)]) == 2
    assert f"simulate: {path}, {message[:6]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-rows 0", "max-rows"),
        ("--max-step-tokens 10", "max-step-tokens"),
        ("--kv-bytes 1e6", "kv-memory"),
        ("--rate 0", "rate must be above 0"),
        ("--noise 1", "noise must be"),
        ("--max-step-ms nan", "max-step-ms must be above 0"),
        ("--requests 2000000 --json /nowhere/out.json", "/nowhere/out.json"),
        ("--priorities 0:-1", "shares of priorities"),
        ("--trace /nowhere", "/nowhere"),
        ("--trace /nowhere --requests 0", "requests must be above 0"),
    ],
)
def test_invalid_flags_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_simulation_reports_what_it_has_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Simulation.run

    def interrupted(self: Simulation, requests: Iterable[TraceRequest]) -> Iterator[int]:
        served = 0
        for done in run(self, requests):
            served += done
            yield done
            if served >= 20:
                raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run", interrupted)
    assert main(["--requests", "500"]) == 130
    printed = capsys.readouterr()
    assert "interrupted; the report is of the requests so far" in printed.err
    assert re.search(r"^requests +2\d served", printed.out)


def test_bytes_that_are_no_number_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("inf", "nan", "much"):
        with pytest.raises(SystemExit) as exit_:
            main(["--kv-bytes", value])
        assert exit_.value.code == 2
        assert f"must be a number of bytes, not '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("served", [0, 1])
def test_a_trace_may_end_with_a_request_that_is_too_long(tmp_path: Path, served: int) -> None:
    lines = [{"arrival": 0, "prompt_tokens": 10, "output_tokens": 2}] * served
    # No step runs after the last request, which arrives when a part of the table begins.
    lines.append({"arrival": 600, "prompt_tokens": 10**9, "output_tokens": 2})
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--trace", str(trace), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["finished"], report["refused"]) == (served, 1)
    assert [part["busy"] for part in report["parts"]][-1] == 0


def test_pages_have_less_padding_than_columns(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    padding = []
    for flags in ([], ["--pages"]):
        machine = ["--machine", "cpu-smollm2-135m", "--requests", "20", "--rate", "0.5"]
        assert main([*machine, "--json", str(out), *flags]) == 0
        padding.append(json.loads(out.read_text())["padding_ratio"])
    assert padding[0] > padding[1] > 0


def _run(seed: int, folder: Path, hash_seed: str) -> tuple[bytes, bytes]:
    """The command's output and JSON file, from a process that must not import MLX."""
    out = folder / f"{seed}-{hash_seed}.json"
    script = (
        "import sys; from chairlift.scheduler.simulate.__main__ import main; assert main() == 0;"
        "assert not any(name.startswith('mlx') for name in sys.modules)"
    )
    flags = ["--requests", "150", "--rate", "12", "--seed", str(seed), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags],
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, out.read_bytes()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_needs_no_mlx(tmp_path: Path) -> None:
    once, again, other = _run(3, tmp_path, "1"), _run(3, tmp_path, "2"), _run(4, tmp_path, "1")
    assert once == again
    assert once != other
    printed, written = once
    assert b"150 served" in printed
    assert json.loads(written)["finished"] == 150
