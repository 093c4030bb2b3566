"""Sources of the settings of ``serve``: flags, environment, file, defaults, in this order."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

from chairlift.api.admission import keys
from chairlift.api.cli.arguments.aliases import AliasAction
from chairlift.api.cli.arguments.config_sources import ConfigError, Resolved, resolve
from chairlift.api.cli.arguments.openai_key import log_origin, with_openai_key
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.arguments.setting import as_toml
from chairlift.api.cli.engine_settings import engine_config
from chairlift.api.cli.main import main
from chairlift.api.cli.serve import add_arguments
from chairlift.loadtest.bench.flags import KEY_VARIABLES
from chairlift.loadtest.bench.flags import add_arguments as bench_arguments
from chairlift.loadtest.cli import config_from_args


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
    actions = [action for action in parser._actions if not isinstance(action, AliasAction)]
    names = {action.dest.replace("_", "-") for action in actions} - {"help", "help-all"}
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
    assert "# api-key = ********  # CHAIRLIFT_API_KEY\n" in printed
    assert "secret" not in printed
    assert 'otlp-endpoint = "http://********@127.0.0.1:4318"  # CHAIRLIFT_OTLP' in printed
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    monkeypatch.delenv("CHAIRLIFT_OTLP_ENDPOINT")
    again = resolved("--config", str(file))
    # Every setting that had a value is in the file.
    assert set(sources(again).values()) == {str(file), "default", "flag"}
    assert (again.options.max_rows, again.options.prefix_cache_dir) == (7, Path("x y"))
    # The key is not printed, so it is not in the file.
    assert tomllib.loads(as_toml(again.settings)) == tomllib.loads(printed) | {"api-key": []}


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
        ("max_rows = 1", "unknown key 'max_rows'; did you mean max-rows?"),
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
        ("port = " + "[" * 10_000, "not valid TOML"),
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


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("flag", ["--api-key", "first-secret,second-secret", "--api-key=third-secret"], None),
        ("CHAIRLIFT_API_KEY", [], "first-secret, second-secret,third-secret"),
    ],
)
def test_api_keys_are_lists_and_are_not_printed(
    name: str, arguments: list[str], key: str | None
) -> None:
    result = resolved(*arguments, **({} if key is None else {"API_KEY": key}))
    assert result.options.api_key == ["first-secret", "second-secret", "third-secret"]
    assert sources(result)["api-key"] == name
    assert "secret" not in as_toml(result.settings)


def test_a_file_may_hold_one_key_or_a_list(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text in ('"one-secret"', '["one-secret"]'):
        file.write_text(f"api-key = {text}")
        assert resolved("--config", str(file)).options.api_key == ["one-secret"]


def test_an_empty_key_is_an_error_and_not_an_open_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--api-key", ""])
    assert "--api-key: is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "given", "source"),
    [
        ([], {"OPENAI_API_KEY": "sk-of-openai"}, ["sk-of-openai"], "OPENAI_API_KEY"),
        ([], {"OPENAI_API_KEY": "none"}, [], "default"),
        ([], {"OPENAI_API_KEY": ""}, [], "default"),
        (["--api-key", "of-a-flag"], {"OPENAI_API_KEY": "sk-of-openai"}, ["of-a-flag"], "flag"),
        (["--api-key-file", "k.toml"], {"OPENAI_API_KEY": "sk-of-openai"}, [], "default"),
        (
            [],
            {"OPENAI_API_KEY": "sk-of-openai", "CHAIRLIFT_API_KEY": "of-chairlift"},
            ["of-chairlift"],
            "CHAIRLIFT_API_KEY",
        ),
    ],
)
def test_serve_reads_the_key_of_openais_clients(
    arguments: list[str], environment: dict[str, str], given: list[str], source: str
) -> None:
    ours = {name[10:]: value for name, value in environment.items() if name.startswith("CHAIR")}
    result = with_openai_key(resolved(*arguments, **ours), environment)
    assert result.options.api_key == given
    assert sources(result)["api-key"] == source


def test_the_log_says_that_the_key_is_openais(caplog: pytest.LogCaptureFixture) -> None:
    for value, said in (("sk-of-openai", "the one in OPENAI_API_KEY"), ("none", "too short")):
        environment = {"OPENAI_API_KEY": value}
        caplog.clear()
        with caplog.at_level("INFO"):
            log_origin(with_openai_key(resolved(), environment).settings, environment)
        (line,) = caplog.messages
        assert said in line
        assert value not in line


def test_servers_and_clients_read_the_same_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEY_VARIABLES == (keys.KEY_VARIABLE, keys.OPENAI_VARIABLE)
    both = {"CHAIRLIFT_API_KEY": "a, b", "OPENAI_API_KEY": "c"}
    for environment, key in (
        (both, "a"),
        ({"OPENAI_API_KEY": "c"}, "c"),
        ({"CHAIRLIFT_API_KEY": "", "OPENAI_API_KEY": "c"}, "c"),
        ({}, None),
    ):
        assert keys.first_key(environment) == key
        for name in both:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        parser = CommandParser()
        bench_arguments(parser)
        assert config_from_args(parser.parse_args([])).api_key == key


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("CHAIRLIFT_MAX_ROW", "CHAIRLIFT_MAX_ROWS"),
        ("CHAIRLIFT_CASHE", "CHAIRLIFT_CACHE"),
        ("CHAIRLIFT_APIKEY", "CHAIRLIFT_API_KEY"),
        ("CHAIRLIFT_MAX_NUM_SEQ", "CHAIRLIFT_MAX_NUM_SEQS"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**{name.removeprefix("CHAIRLIFT_"): "a-secret-value"})
    assert str(caught.value) == f"unknown variable {name}; did you mean {near}?"


def test_variables_that_are_read_elsewhere_or_set_by_kubernetes_are_no_errors() -> None:
    assert sources(
        resolved(
            CACHE="x",
            BLAS="y",
            UNKNOWN="",
            SERVICE_HOST="10.0.0.1",
            GRAFANA_SERVICE_PORT_HTTP="80",
            GRAFANA_PORT="tcp://10.0.0.1:80",
            GRAFANA_PORT_80_TCP_ADDR="10.0.0.1",
        )
    ) == sources(resolved())
    with pytest.raises(ConfigError, match="unknown variable CHAIRLIFT_GRAFANA_PORT"):
        resolved(GRAFANA_PORT="80")


def test_every_variable_that_the_code_reads_is_known() -> None:
    code = [path.read_text() for top in ("api", "engine") for path in (ROOT / top).rglob("*.py")]
    read = {name for text in code for name in re.findall(r'"(CHAIRLIFT_[A-Z_]+[A-Z])"', text)}
    assert read >= {"CHAIRLIFT_CACHE", "CHAIRLIFT_BLAS", "CHAIRLIFT_API_KEY"}
    resolved(**{name.removeprefix("CHAIRLIFT_"): "a-long-value" for name in read})
