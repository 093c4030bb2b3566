"""The benchmark of the engine alone, with a tiny model on the CPU."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import let_ranks_preempt
from support.tiny import tiny_config

pytestmark = pytest.mark.system


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_are_measured_one_after_the_other(ranks: int, tmp_path: Path) -> None:
    let_ranks_preempt()
    config, report = tmp_path / "config.json", tmp_path / "report.json"
    config.write_text(json.dumps(tiny_config("llama", vocab_size=259, layers=1, head_dim=64)))
    command = [sys.executable, "-m", "chairlift.loadtest.engine_bench", "--only", "ours"]
    command += ["--model", str(config), "--dtype", "float32"]
    command += ["--decode", "1", "3", "--context", "9", "--requests", "6", "--rows", "4"]
    command += ["--prompt-tokens", "lognormal:9:0.9:40", "--output-tokens", "3:9"]
    command += ["--tensor-parallel-size", str(ranks), "--out", str(report)]
    if ranks == 1:
        command += ["--rate", "50", "--bits", "4", "--speculative", "0.8"]
        command += ["--kv-bits", "8", "--max-step-ms", "15", "--kv-gb", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())["ours"]
    if ranks == 1:
        ratios = json.loads(report.read_text())["speculative"]
        assert ratios.keys() == {"1", "3"}
        assert all(0 < ratio < math.inf for ratio in ratios.values())
        [one] = [line for line in done.stdout.splitlines() if line.startswith("drafts      1 rows")]
        accepted, proposed = re.findall(r"\((.*) of (.*) tokens right", one)[0]
        assert 0 < float(accepted) < float(proposed)
    names = ["decode_1_rows_ms", "decode_3_rows_ms", "output_tokens_per_s", "seconds"]
    assert all(0 < figures[name] < math.inf for name in names)
    # For each engine its rows, whether it was paced, and the peak of each rank's memory.
    assert [peaks[:2] for peaks in figures["peak_bytes"]] == [[1, False], [3, False], [4, True]]
    assert all(len(peaks) == 2 + ranks and min(peaks[2:]) > 0 for peaks in figures["peak_bytes"])


def test_decode_steps_may_be_left_out(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config("llama", vocab_size=259, layers=1)))
    command = [sys.executable, "-m", "chairlift.loadtest.engine_bench", "--only", "ours"]
    command += ["--model", str(config), "--dtype", "float32", "--kv-gb", "0.05", "--rows", "4"]
    command += ["--requests", "2", "--prompt-tokens", "3:9", "--output-tokens", "3:9", "--decode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "output_tokens_per_s" in done.stdout
    assert "ms a step" not in done.stdout


def test_a_request_that_can_never_fit_ends_with_a_message(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config("llama", vocab_size=259, layers=1)))
    command = [sys.executable, "-m", "chairlift.loadtest.engine_bench", "--only", "ours"]
    command += ["--model", str(config), "--dtype", "float32", "--kv-gb", "0.005", "--requests", "0"]
    command += ["--decode", "1", "--context", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "engine_bench: a request of 1000240 tokens is too long: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_of_the_model_is_measured(tmp_path: Path) -> None:
    config, report = tmp_path / "config.json", tmp_path / "report.json"
    config.write_text(json.dumps(tiny_config("qwen3", vocab_size=512, layers=1, head_dim=64)))
    command = [sys.executable, "-m", "chairlift.loadtest.engine_bench", "--server"]
    command += ["--model", str(config), "--dtype", "float32", "--bits", "8", "--kv-gb", "0.05"]
    command += ["--kv-bits", "4", "--max-step-ms", "15"]
    command += ["--requests", "12", "--rows", "4", "--max-concurrency", "6", "--rate", "40"]
    command += ["--prompt-tokens", "lognormal:9:0.9:40", "--output-tokens", "2:9"]
    done = subprocess.run(
        [*command, "--out", str(report)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())["server"]
    # Tokens that arrive together are 0 ms apart.
    assert all(0 <= value < math.inf for value in figures.values())
    assert min(figures["output_tokens_per_s"], figures["ttft_p50_ms"], figures["seconds"]) > 0
    names = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    assert figures.keys() >= set(names)
    for name in names:
        assert name in done.stdout
