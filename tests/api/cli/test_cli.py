"""The command line imports little, builds the settings, and fails with one clear line."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.paths import ROOT

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.engine_settings import engine_config
from chairlift.api.cli.flags import byte_size, http_url, positive
from chairlift.api.cli.main import main
from chairlift.api.cli.serve import add_arguments
from chairlift.api.cli.serve_flags import output_flags
from chairlift.api.http.version import VERSION, own_version
from chairlift.engine.config import EngineConfig, decode_path, encode_path
from chairlift.engine.device.limits import step_seconds
from chairlift.engine.device.memory import swap_bytes
from chairlift.engine.device.profile import CPU
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.process.engine_process import Start

FLAG = re.compile(r"--[a-z][a-z-]*")


def chairlift(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "chairlift", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1024), ("512M", 512 << 20), ("4G", 4 << 30), ("1.5GiB", 3 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "4X", "1e9", "four", "8388608T", "9" * 400])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", str(1 << 63)])
def test_bad_counts(text: str) -> None:
    assert positive(str((1 << 63) - 1)) == (1 << 63) - 1
    with pytest.raises(argparse.ArgumentTypeError):
        positive(text)


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "http://", "http://[", "http://host:99999"])
def test_bad_addresses(text: str) -> None:
    assert http_url("http://[::1]:8000/a") == "http://[::1]:8000/a"
    with pytest.raises(argparse.ArgumentTypeError):
        http_url(text)


def test_the_command_line_imports_nothing_slow() -> None:
    code = (
        "import sys, chairlift.api.cli.main, chairlift.api.cli.serve;"
        "slow = ('mlx', 'mlx_lm', 'transformers', 'aiohttp', 'huggingface_hub', 'shtab', 'numpy');"
        "print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chairlift("--version").stdout == f"chairlift {VERSION}\n"
    assert own_version() == VERSION
    monkeypatch.setattr(sys, "path", [])
    assert own_version() == "0+checkout"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_all_commands_and_their_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("doctor", "max-step-tokens", "print-config", "max-concurrency", "temperature"):
        assert word in script


def test_bash_completes_with_the_script() -> None:
    script = chairlift("completion", "bash").stdout
    complete = (
        "COMP_WORDS=(chairlift serve --max-r); COMP_CWORD=2; _shtab_chairlift; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{complete}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split() == ["--max-rows"]


def config_of(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return engine_config(parser.parse_args(arguments))


def test_the_reference_has_all_flags_and_no_others() -> None:
    page = ROOT.joinpath("docs", "reference", "flags.md").read_text()
    rows = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `--")]
    listed = [flag for row in rows for flag in FLAG.findall(row)]
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    assert sorted(listed) == sorted(parser._option_string_actions)


def test_without_flags_the_defaults_apply() -> None:
    assert config_of() == EngineConfig()


def test_the_time_of_a_step_is_given_in_milliseconds() -> None:
    config = config_of("--max-step-ms", "40")
    assert config == EngineConfig(max_step_ms=40)
    assert step_seconds(config, CPU) == pytest.approx(0.04)
    assert step_seconds(EngineConfig(), CPU) == CPU.step_seconds


def test_the_flags_of_the_caches_reach_the_engine_process(tmp_path: Path) -> None:
    config = config_of(
        *("--prefix-cache-bytes", "1.5G", "--prefix-cache-dir", str(tmp_path / "new")),
        *("--prefix-cache-dir-bytes", "512M", "--kv-bits", "4", "--kv-group-size", "32"),
        *("--swap-memory", "3G", "--swap-dir", str(tmp_path), "--swap-dir-bytes", "20G"),
    )
    assert config == EngineConfig(
        prefix_cache_bytes=3 << 29,
        prefix_cache_dir=tmp_path / "new",
        prefix_cache_dir_bytes=512 << 20,
        swap_memory=3 << 30,
        swap_dir=tmp_path,
        swap_dir_bytes=20 << 30,
        kv_bits=4,
        kv_group_size=32,
    )
    start = Start(config, ModelSource("m", "directory", tmp_path))
    sent = msgspec.msgpack.encode(start, enc_hook=encode_path)
    assert msgspec.msgpack.decode(sent, type=Start, dec_hook=decode_path) == start


def test_the_defaults_of_the_caches() -> None:
    config = config_of("--kv-bits", "8", "--prefix-cache-dir", "prefixes")
    assert (config.kv_bits, config.kv_group_size) == (8, 64)
    assert config.prefix_cache_bytes is None
    assert config.prefix_cache_dir_bytes == 10 << 30
    assert config_of("--prefix-cache-bytes", "0").prefix_cache_bytes == 0
    assert config.swap_dir_bytes == 10 << 30
    assert 0 < swap_bytes(config, CPU) <= 4 << 30
    assert swap_bytes(config_of("--swap-memory", "0"), CPU) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-group-size", "64"], "--kv-group-size needs --kv-bits"),
        (["--prefix-cache-dir-bytes", "1G"], "--prefix-cache-dir-bytes needs --prefix-cache-dir"),
        (["--prefix-cache-bytes", "0", "--prefix-cache-dir", "x"], "prefix-cache-bytes 0 turns"),
        (["--prefix-cache-dir", __file__], "is not a directory"),
        (["--swap-dir-bytes", "1G"], "--swap-dir-bytes needs --swap-dir"),
        (["--swap-memory", "0", "--swap-dir", "x"], "swap-memory 0 takes away"),
        (["--swap-dir", __file__], "is not a directory"),
        (["--prefix-cache-dir", ""], "is not a directory"),
        (["--prefix-cache-dir", "x", "--prefix-cache-dir-bytes", "0"], "is not a size"),
        (["--prefix-cache-bytes", "-1"], "--prefix-cache-bytes"),
        (["--prefix-cache-bytes", "auto"], "is not a size"),
        (["--kv-bits", "3"], "--kv-bits"),
        (["--kv-bits", "8", "--kv-group-size", "48"], "--kv-group-size"),
    ],
)
def test_bad_flags_of_the_caches_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_cache_bytes": -1}, "prefix-cache-bytes must be at least 0"),
        ({"prefix_cache_dir_bytes": 0}, "prefix-cache-dir-bytes must be at least 1"),
        ({"swap_memory": -1}, "swap-memory must be at least 0"),
        ({"swap_dir_bytes": 0}, "swap-dir-bytes must be at least 1"),
        ({"kv_bits": 16}, "kv-bits must be one of"),
        ({"kv_bits": 8, "kv_group_size": 16}, "kv-group-size must be one of"),
        ({"prefix_cache_bytes": 0, "prefix_cache_dir": Path("x")}, "needs the prefix cache"),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_help_says_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    words = " ".join(capsys.readouterr().out.split())
    for said in ("0 turns it off", "(default: 10G)", "(default: 64)", "(default: not quantized)"):
        assert said in words


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "70000"],
        ["serve", "--max-rows", "0"],
        ["serve", "--kv-memory", "much"],
        ["serve", "--dtype", "int3"],
        ["serve", "--keep-alive-seconds", "nan"],
        ["chat", "--base-url", "127.0.0.1:8000"],
        ["chat", "--temperature", "hot"],
        ["doctor", "--port", "x"],
        ["completion", "cmd"],
        ["fly"],
        [],
    ],
)
def test_bad_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
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


def test_the_chat_template_is_checked_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jinja"
    good = (
        "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    )
    file.write_text(good)
    assert template_of("--chat-template", str(file)) == good
    for text, message in (("{% if x %}", "line 1: Unexpected end"), ("\n{{", "line 2: ")):
        file.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            template_of("--chat-template", str(file))
    with pytest.raises(SystemExit):
        main(["serve", "--chat-template", str(tmp_path / "none")])
    assert "none: No such file" in capsys.readouterr().err.splitlines()[-1]


def template_of(*arguments: str) -> Any:
    parser = CommandParser()
    add_arguments(parser)
    return output_flags.output_settings(parser.parse_args(arguments))["chat_template"]


def test_flags_of_memory_seed_and_revision() -> None:
    config = config_of("--gpu-memory-utilization", "0.9", "--revision", "v2")
    assert (config.memory_share, config.revision) == (0.9, "v2")
    with pytest.raises(ValueError, match="--gpu-memory-utilization and --kv-memory"):
        config_of("--gpu-memory-utilization", "0.9", "--kv-memory", "4G")
    for flag, value in (
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "90"),
        ("--gpu-memory-utilization", "nan"),
        ("--seed", "-1"),
        ("--seed", "9223372036854775808"),
        ("--seed", "x"),
    ):
        with pytest.raises(SystemExit):
            config_of(flag, value)


def test_ctrl_c_during_a_commands_imports_ends_it_quietly() -> None:
    """Also if the import would lose an exception, as some C libraries do."""
    code = (
        "import os, signal, sys\n"
        "from chairlift.api.cli import main as command\n"
        "imported = command.import_module\n"
        "def interrupted(name):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    return imported(name)\n"
        "command.import_module = interrupted\n"
        "sys.exit(command.main(['models']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_commands_own_handling_of_ctrl_c_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)

    def fetch(model: str, revision: str | None) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("chairlift.engine.hub.source.fetch", fetch)
    try:
        code = main(["fetch", str(tmp_path)])
    except KeyboardInterrupt:  # it would end pytest
        code = -1
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is before
