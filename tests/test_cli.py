"""The command line: it is quick, builds the settings, and fails with one clear line."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.api.cli import byte_size, main


def chairlift(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from chairlift.api.cli import main; raise SystemExit(main())",
            *list(arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1024), ("512M", 512 << 20), ("4G", 4 << 30), ("1.5GiB", 3 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "4X", "1e9", "four"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


def test_the_command_line_imports_nothing_slow() -> None:
    code = (
        "import sys, chairlift.api.cli;"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "70000"],
        ["serve", "--max-rows", "0"],
        ["serve", "--kv-memory", "much"],
        ["serve", "--dtype", "int3"],
        ["serve", "--keep-alive-seconds", "nan"],
        ["fly"],
        [],
    ],
)
def test_bad_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = chairlift("serve", str(tmp_path / "no.gguf"), "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("chairlift: error: ")
    assert "no.gguf" in line


def test_a_port_that_is_taken_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = chairlift("serve", "--port", str(port), "--log-level", "error")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}" in line
