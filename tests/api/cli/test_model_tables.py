"""Several models on the command line and in the file: which there are, and each one's flags."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.cli.arguments import config_sources
from chairlift.api.cli.arguments.config_sources import ConfigError
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.arguments.setting import as_toml
from chairlift.api.cli.model_specs import model_keys, model_specs
from chairlift.api.cli.serve import add_arguments, server_settings
from chairlift.api.models.spec import ModelSpec
from chairlift.engine.config import DEFAULT_MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def specs_of(folder: Path, *arguments: str, toml: str = "") -> list[ModelSpec]:
    parser = CommandParser()
    add_arguments(parser)
    if toml:
        file = folder / "serve.toml"
        file.write_text(toml)
        arguments = (*arguments, "--config", str(file))
    parser.parse_args(arguments)
    options, sourced = config_sources.resolve(parser, arguments, {})
    return model_specs(parser, options, server_settings(options), sourced)


def test_models_of_the_command_line_share_its_flags(folder: Path) -> None:
    [alone] = specs_of(folder)
    assert (alone.config.model, alone.load, alone.keep_alive) == (DEFAULT_MODEL, "eager", None)
    specs = specs_of(
        folder, "a", "b", "c", *("--load", "lazy", "--keep-alive", "60", "--max-rows", "4")
    )
    assert [spec.config.model for spec in specs] == ["a", "b", "c"]
    assert {(s.load, s.keep_alive, s.config.max_rows) for s in specs} == {("lazy", 60.0, 4)}
    # A name is the first model's.
    named = specs_of(folder, "a", "b", "--served-model-name", "x", "--alias", "y", "--alias", "z")
    assert [spec.settings.served_model_name for spec in named] == ["x", None]
    assert [spec.aliases for spec in named] == [("y", "z"), ()]


def test_tables_override_the_flags_for_their_model(folder: Path) -> None:
    toml = """
        load = "lazy"
        max-rows = 8
        [[models]]
        model = "a"
        served-model-name = "first"
        alias = ["gpt-4o", "gpt-4"]
        load = "eager"
        kv-memory = "1G"
        max-context = 512
        tool-parser = "json"
        override-generation-config = '{"temperature": 0.5}'
        [[models]]
        model = "b"
        keep-alive = 30
        max-num-seqs = 2
        trust-remote-code = true
        embedding-pooling = "last"
    """
    first, second = specs_of(folder, toml=toml)
    assert (first.config.model, first.load, first.keep_alive) == ("a", "eager", None)
    assert first.settings.served_model_name == "first"
    assert first.aliases == ("gpt-4o", "gpt-4")
    assert (first.config.kv_memory, first.config.max_context, first.config.max_rows) == (
        *(1 << 30, 512, 8),
    )
    assert first.settings.override_generation_config == {"temperature": 0.5}
    assert (second.config.model, second.load, second.keep_alive) == ("b", "lazy", 30.0)
    assert (second.config.max_rows, second.config.trust_remote_code) == (2, True)
    assert (first.settings.embedding_pooling, second.settings.embedding_pooling) == ("mean", "last")
    assert second.config.kv_memory is None
    # The positional model comes first, and texts stand for models without flags of their own.
    both = specs_of(folder, "z", toml='models = ["y", { model = "x" }]')
    assert [spec.config.model for spec in both] == ["z", "y", "x"]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[[models]]\nload = 'lazy'", "models table 1: has no key 'model'"),
        ("[[models]]\nmodel = 'a'\nport = 1", "models table 1: unknown key 'port'"),
        ("[[models]]\nmodel = 'a'\nmodels = ['b']", "models table 1: unknown key 'models'"),
        ("[[models]]\nmodel = 'a'\nlod = 'lazy'", "unknown key 'lod'.*load"),
        ("[[models]]\nmodel = 'a'\nload = 'soon'", "models table 1: load: 'soon' is not one of"),
        (
            "[[models]]\nmodel = 'a'\n[[models]]\nkeep-alive = -1",
            "table 2: keep-alive",
        ),
        ("[[models]]\nmodel = 'a'\ngpu-memory-utilization = 0.5", "unknown key 'gpu-memory-util"),
        ("models = 'a'", "models: must be a list"),
        ("models = [[]]", "models: must be a text or a number"),
        ("served-model-name = 'x'\nmodels = ['a']", "--served-model-name is for one model"),
        ("[[models]]\nmodel = 'a'\nalias = ['b', '']", "table 1: alias: '' cannot name a model"),
        ("alias = ['']", "alias: '' cannot name a model"),
        ("[[models]]\nmodel = 'a'\nserved-model-name = ''", "served-model-name: '' cannot name"),
        ("[[models]]\nmodel = 'a'\nkv-group-size = 64", "--kv-group-size needs --kv-bits"),
    ],
)
def test_wrong_tables_are_one_line_that_names_the_place(
    folder: Path, toml: str, message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message) as wrong:
        specs_of(folder, toml=toml)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("flag", ["--alias", "--served-model-name"])
@pytest.mark.parametrize("name", ["", " ", "a ", "\ta", "a\nb"])
def test_names_that_no_request_can_give_are_refused(
    flag: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        specs_of(folder, "a", flag, name)
    assert f"{flag}: {name!r} cannot name a model" in capsys.readouterr().err


def test_a_table_takes_every_flag_of_the_engine_and_none_of_the_server() -> None:
    parser = CommandParser()
    add_arguments(parser)
    keys = model_keys(parser)
    for key in ("model", "load", "keep-alive", "alias", "max-rows", "max-context", "max-queue"):
        assert key in keys
    for key in (
        "port",
        "api-key",
        "config",
        "models-memory",
        "drain-timeout",
        "log-level",
        "ui",
        "lora-dir",
    ):
        assert key not in keys
    assert len(keys) == len(set(keys))


@pytest.mark.slow
def test_every_key_of_a_table_changes_its_model_only(folder: Path) -> None:
    """No key is accepted and then ignored."""
    template, hosts = folder / "template.jinja", folder / "hosts.json"
    template.write_text("{{ messages }}")
    hosts.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]')
    objects = ('{"temperature": 0.5}', '{"method": "ngram"}')
    choices = ("lazy", "float16", "json", "last", "none", "<a>,</a>", *objects)
    candidates = [
        *('"{}"'.format(text.replace('"', '\\"')) for text in choices),
        *("true", "1", "2", "8", "32", "0.5", '"2G"', '["x"]', '["0", "1"]', '["a=b"]'),
        *(f'"{path}"' for path in (folder, template, hosts)),
    ]
    needs = {"kv-group-size": "kv-bits = 8", "hostfile": "tensor-parallel-size = 2"}
    needs["num-draft-tokens"] = 'draft-model = "small"'
    needs |= {f"{kind}-dir-bytes": f'{kind}-dir = "{folder}"' for kind in ("prefix-cache", "swap")}
    parser = CommandParser()
    add_arguments(parser)

    def changed(key: str, value: str) -> bool:
        def first_and_second(line: str) -> list[ModelSpec]:
            table = f'[[models]]\nmodel = "a"\n{needs.get(key, "")}\n{line}\n'
            return specs_of(folder, toml=f'{table}[[models]]\nmodel = "b"\n')

        try:
            [first, second] = first_and_second(f"{key} = {value}")
        except (ConfigError, ValueError):
            return False
        [plain, other] = first_and_second("")
        assert second == other, key
        return first != plain

    for key in model_keys(parser):
        assert key == "model" or any(changed(key, value) for value in candidates), key


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)


@given(tables=st.lists(st.dictionaries(st.just("model") | st.just("alias"), _TEXTS), max_size=3))
def test_printed_models_are_a_file_with_the_same_models(tables: list[dict[str, Any]]) -> None:
    printed = as_toml([config_sources.Setting("models", tables, "file")])
    assert tomllib.loads(printed) == {"models": tables}
