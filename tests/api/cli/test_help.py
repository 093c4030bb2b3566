"""Help leads with the common flags, is fast, and says what run time will choose."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import pytest

from chairlift.api.cli.arguments.device_values import by_device, chosen
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.main import main
from chairlift.api.cli.serve import COMMON_FLAGS, add_arguments
from chairlift.engine.config import EngineConfig
from chairlift.engine.device import backend
from chairlift.engine.device.limits import max_step_tokens
from chairlift.engine.device.profile import CPU, CUDA, METAL, current


def help_of(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", flag])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    lines = (line.split() for line in text.splitlines() if line.startswith("  -"))
    return {word.rstrip(",") for words in lines for word in words if word.startswith("--")}


def test_help_has_ten_flags_and_help_all_has_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser()
    add_arguments(parser)
    short, full = help_of(capsys, "--help"), help_of(capsys, "--help-all")
    assert len(COMMON_FLAGS) == 10
    assert flags_in(short) == set(COMMON_FLAGS)
    assert len(short.splitlines()) < 50
    assert "--help-all shows all" in short
    groups = [group for group in parser._action_groups if group.title not in (None, "options")]
    for group in groups:
        if group._group_actions:
            assert f"{group.title}:" in full
    names = {name for name in parser._option_string_actions if name.startswith("--")}
    assert names <= {word.strip(",()") for word in full.split()}


def test_help_of_a_plain_parser_is_whole() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert "--otlp-endpoint" in parser.format_help()


def test_an_error_shows_one_line_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--port", "x"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: chairlift serve [MODEL ...] [flags]"
    assert error.startswith("chairlift serve: error: argument --port")


def test_help_says_what_each_device_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(help_of(capsys, "--help-all").split())
    rows = f"by device: cpu {CPU.max_rows}, cuda {CUDA.max_rows}, metal {METAL.max_rows}"
    assert by_device("max-rows") == rows
    assert f"(default: {rows})" in words
    tokens = max_step_tokens(EngineConfig(), CUDA)
    assert f"cuda {tokens}, metal" in words
    cpu, cuda, metal = (f"{1e3 * profile.step_seconds:g}" for profile in (CPU, CUDA, METAL))
    assert f"cpu {cpu}, cuda {cuda}, metal {metal}" in words
    assert "cpu 50%, cuda 85%, metal 70%" in words


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help-all"]])
def test_help_needs_neither_mlx_nor_much_time(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from chairlift.api.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "slow = ('mlx', 'mlx_lm', 'transformers', 'aiohttp', 'numpy', 'jinja2')\n"
        "print([module for module in slow if module in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "[]"
    if arguments == ["--help"]:
        # CPU time, which other processes disturb less than the clock.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2


def test_print_config_has_the_values_of_this_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--kv-bits", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    profile = current()
    assert f"# max-rows = {profile.max_rows}  # device {profile.kind}" in lines
    tokens = max_step_tokens(EngineConfig(), profile)
    assert f"# max-step-tokens = {tokens}  # device {profile.kind}" in lines
    assert "kv-bits = 8  # flag" in lines
    assert "# kv-group-size = 64  # with kv-bits" in lines
    parser = CommandParser()
    add_arguments(parser)
    # Every value that is left open by all sources has one here, or no limit.
    values = chosen(EngineConfig())
    for line in lines:
        key = line.removeprefix("# ").split(" =")[0]
        assert key not in values or f"# {values[key].source}" in line or key == "kv-bits"


def test_chosen_values_follow_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--max-rows", "3", "--kv-memory", "1G"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tokens = current().chunk_tokens + 3
    assert any(line.startswith(f"# max-step-tokens = {tokens} ") for line in lines)
    assert any("prefix-cache-bytes =  #" in line and "a third" in line for line in lines)
    assert "kv-memory = 1073741824  # flag" in lines


def test_without_mlx_the_configuration_is_still_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise backend.BackendError("no backend is installed")

    monkeypatch.setattr("chairlift.api.cli.arguments.device_values.import_mlx", fail)
    assert main(["serve", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "# max-rows =  # device unknown: no backend is installed\n" in out
