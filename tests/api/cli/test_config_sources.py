"""Sources of the settings of ``serve``: flags, environment, file, defaults, in this order."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest

from chairlift.api.cli.config_sources import ConfigError, Resolved, as_toml, resolve
from chairlift.api.cli.main import main
from chairlift.api.cli.serve import add_arguments, engine_config


def resolved(*arguments: str, **environment: str) -> Resolved:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser, arguments, {f"CHAIRLIFT_{k}": v for k, v in environment.items()})


def sources(result: Resolved) -> dict[str, str]:
    return {setting.key: setting.source for setting in result.settings}


def test_each_source_overrides_those_after_it(tmp_path: Path) -> None:
    file = tmp_path / "chairlift.toml"
    file.write_text(
        'model = "in/file"\nport = 1\nmax-rows = 1\nmax-queue = 1\nkv-memory = "1G"\n'
        'cors-origin = ["https://a.org", "https://b.org"]\ntrust-remote-code = true\n'
    )
    result = resolved(
        *("--port", "3", "--max-rows", "3", "--cors-origin", "https://c.org"),
        **{"PORT": "2", "MAX_QUEUE": "2", "MODEL": "in/environment", "CONFIG": str(file)},
        **{"TRUST_REMOTE_CODE": "off", "HOST": ""},
    )
    options, given = result.options, sources(result)
    assert (options.port, given["port"]) == (3, "flag")
    assert (options.max_rows, given["max-rows"]) == (3, "flag")
    assert (options.max_queue, given["max-queue"]) == (2, "CHAIRLIFT_MAX_QUEUE")
    assert (options.model, given["model"]) == ("in/environment", "CHAIRLIFT_MODEL")
    assert (options.trust_remote_code, given["trust-remote-code"]) == (
        False,
        "CHAIRLIFT_TRUST_REMOTE_CODE",
    )
    assert (options.kv_memory, given["kv-memory"]) == (1 << 30, str(file))
    assert (options.host, given["host"]) == ("127.0.0.1", "default")
    # A list is replaced, not extended.
    assert options.cors_origin == ["https://c.org"]
    assert engine_config(options).kv_memory == 1 << 30


def test_every_flag_of_serve_is_a_setting() -> None:
    result = resolved("--log-level", "debug", MAX_STEP_MS="40", CORS_ORIGIN="https://a.org,*")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = {action.dest.replace("_", "-") for action in parser._actions} - {"help"}
    assert set(sources(result)) == names
    assert result.options.cors_origin == ["https://a.org", "*"]


def test_the_printed_configuration_can_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_OTLP_ENDPOINT", "http://me:secret-word@127.0.0.1:4318")
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "a-secret-key")
    assert main(["serve", "--print-config", "--max-rows", "7", "--prefix-cache-dir", "x y"]) == 0
    printed = capsys.readouterr().out
    assert "max-rows = 7  # flag\n" in printed
    assert "# rpm =  # default\n" in printed
    assert "# CHAIRLIFT_API_KEY = ********  # environment\n" in printed
    assert "secret" not in printed
    assert 'otlp-endpoint = "http://********@127.0.0.1:4318"  # CHAIRLIFT_OTLP' in printed
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    monkeypatch.delenv("CHAIRLIFT_OTLP_ENDPOINT")
    again = resolved("--config", str(file))
    # Every setting that had a value is in the file.
    assert set(sources(again).values()) == {str(file), "default", "flag"}
    assert (again.options.max_rows, again.options.prefix_cache_dir) == (7, Path("x y"))
    assert tomllib.loads(as_toml(again.settings)) == tomllib.loads(printed)


def test_a_negative_switch(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-page", dest="page", action="store_false")
    parser.add_argument("--config", type=Path)
    file = tmp_path / "c.toml"
    for text, page in (("true", False), ("false", True)):
        file.write_text(f"no-page = {text}")
        result = resolve(parser, ["--config", str(file)], {})
        assert result.options.page is page
        assert as_toml(result.settings) == f"no-page = {text}  # {file}\n"
    assert not resolve(parser, [], {"CHAIRLIFT_NO_PAGE": "yes"}).options.page
    assert not resolve(parser, ["--no-page"], {"CHAIRLIFT_NO_PAGE": "no"}).options.page
    assert as_toml(resolve(parser, [], {}).settings) == "no-page = false  # default\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_rows = 1", "unknown key 'max_rows'; did you mean 'max-rows'?"),
        ("colour = 1", "unknown key 'colour'"),
        ('config = "x"', "unknown key 'config'"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = 70000", "port: '70000' is not a port"),
        ("max-rows = true", "max-rows: must be a text or a number"),
        ("max-rows = [1]", "max-rows: must be a text or a number"),
        ('dtype = "int3"', "dtype: 'int3' is not one of auto, float32"),
        ("kv-bits = 3", "kv-bits: 3 is not one of"),
        ('trust-remote-code = "maybe"', "trust-remote-code: must be true or false"),
        ('cors-origin = "*"', "cors-origin: must be a list"),
        ("port = ", "not valid TOML"),
    ],
)
def test_an_error_in_a_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolved("--config", str(file))
    assert str(caught.value).startswith(f"{file}: {message}")


def test_an_error_names_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: No such file"):
        resolved(CONFIG="no.toml")
    # As Kubernetes sets it for a service named chairlift.
    with pytest.raises(ConfigError, match=r"CHAIRLIFT_PORT: 'tcp://10\.0\.0\.1:80' is not a port"):
        resolved(PORT="tcp://10.0.0.1:80")
    monkeypatch.setenv("CHAIRLIFT_MAX_ROWS", "none")
    with pytest.raises(SystemExit) as exit_info:
        main(["serve"])
    assert exit_info.value.code == 2
    assert "CHAIRLIFT_MAX_ROWS: 'none' is not a whole" in capsys.readouterr().err.splitlines()[-1]
