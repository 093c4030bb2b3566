"""Flags are exact, and no error repeats an argument that may be an API key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.main import COMMANDS, build_parser, main

SECRET = "sk-a-secret-key"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    return said.err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_can_be_abbreviated(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (subparsers,) = (a for a in build_parser(COMMANDS)._actions if a.dest == "==SUPPRESS==")
    assert isinstance(subparsers.choices, dict)
    parser = subparsers.choices[command]
    flags = {name for name in parser._option_string_actions if name.startswith("--")}
    for flag in flags:
        for end in range(3, len(flag)):
            if flag[:end] not in flags:
                assert parser._get_option_tuples(flag[:end]) == []
        misspelt = f"{flag}x"
        for arguments in ([misspelt, SECRET], [f"{misspelt}={SECRET}"]):
            if misspelt not in flags:
                error = error_of(capsys, command, *arguments)
                assert f"unknown flag {misspelt}; did you mean --" in error or len(flag) < 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--api-ky", SECRET], "unknown flag --api-ky; did you mean --api-key"),
        (["chat", f"--api-kee={SECRET}"], "unknown flag --api-kee; did you mean --api-key?"),
        (["doctor", SECRET], "1 argument too many; put a value with blanks in quotation marks"),
        (["serve", "a", "--port", "1", SECRET], "name every MODEL before the flags"),
        (["models", "a", "--json", SECRET], "name every DIR before the flags"),
        (["serve", f"--no-ui={SECRET}"], "--no-ui: takes no value"),
        (["serve", f"-k{SECRET}"], "unknown flag with one dash"),
        (["--api-key", SECRET, "serve"], "unknown flag --api-key"),
        ([SECRET], "unknown command (one of serve, bench"),
        ([f"--api-key={SECRET}", "serve"], "unknown flag --api-key"),
        (["serv"], "unknown command; did you mean serve?"),
    ],
)
def test_errors_name_flags_but_no_values(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *arguments)


@pytest.mark.parametrize("value", ["int3", "x"])
def test_a_wrong_choice_of_a_known_flag_is_quoted(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = CommandParser(prog="tool")
    parser.add_argument("--dtype", choices=("auto", "float16"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", value])
    assert repr(value) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["loadtest.null", "loadtest.schemas", "loadtest.cli", "scheduler.simulate"]
)
def test_the_tools_refuse_unknown_flags(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"chairlift.{module}", "--bogus-flag=1"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert "--bogus-flag" in done.stderr.splitlines()[-1]
