"""--generation-config and --override-generation-config, up to the settings of the server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from chairlift.api.cli.main import main
from chairlift.api.cli.serve import add_arguments, server_settings
from chairlift.api.settings import ServerSettings


def settings(*arguments: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return server_settings(parser.parse_args(arguments))


def test_the_defaults() -> None:
    assert settings().generation_config == "auto"
    assert settings().override_generation_config == {}


@pytest.mark.parametrize("name", ["none", "vllm"])
def test_vllms_name_for_none(name: str) -> None:
    assert settings("--generation-config", name).generation_config == "none"


def test_a_path_and_an_override(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    result = settings(
        *("--generation-config", str(tmp_path)),
        *("--override-generation-config", '{"temperature": 0.5, "top_k": null}'),
    )
    assert result.generation_config == str(tmp_path)
    assert result.override_generation_config == {"temperature": 0.5, "top_k": None}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (
            "--generation-config",
            "/nothing/here",
            "not auto, none or a file: '/nothing/here': no such",
        ),
        ("--generation-config", "/", "'/generation_config.json': no such file"),
        ("--generation-config", "", "not auto, none or a file: '.': no such file"),
        ("--generation-config", "a\0b", "not auto, none or a file"),
        ("--override-generation-config", "{", "'{' is not a JSON object"),
        ("--override-generation-config", "[1]", "'[1]' is not a JSON object"),
        ("--override-generation-config", "[" * 100_000, "is not a JSON object"),
        ("--override-generation-config", '{"max_tokens": 5}', "unknown key 'max_tokens'"),
        ("--override-generation-config", '{"top_p": 7}', "top_p is 7, but should be less than"),
        ("--override-generation-config", '{"top_p": NaN}', "top_p is nan, but should be"),
    ],
)
def test_wrong_values_are_one_line(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", flag, value])
    assert exit_.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert flag in error
    assert message in error


def test_they_are_in_the_printed_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_OVERRIDE_GENERATION_CONFIG", '{"top_k": 5}')
    assert main(["serve", "--print-config", "--generation-config", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert 'generation-config = "none"  # flag\n' in printed
    assert 'override-generation-config = "{\\"top_k\\": 5}"  # CHAIRLIFT_OVERRIDE_' in printed
    monkeypatch.delenv("CHAIRLIFT_OVERRIDE_GENERATION_CONFIG")
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    assert '"{\\"top_k\\": 5}"' in capsys.readouterr().out
