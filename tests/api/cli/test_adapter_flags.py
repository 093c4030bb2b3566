"""The flags for LoRA adapters, by this server's names and by vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from chairlift.api.cli.arguments import config_sources
from chairlift.api.cli.serve import add_arguments, engine_config, server_settings
from chairlift.api.settings import LoraSource


def _options(*arguments: str, file: Path | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config: Sequence[str] = () if file is None else ("--config", str(file))
    options = config_sources.resolve(parser, [*arguments, *config], {}).options
    assert isinstance(options, argparse.Namespace)
    return options


def _loras(*arguments: str, file: Path | None = None) -> list[tuple[str, str]]:
    settings = server_settings(_options(*arguments, file=file))
    return [(lora.name, str(lora.path)) for lora in settings.loras]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lora", "a=/x", "--lora", "b=/y=z"),
        ("--lora-modules", "a=/x", "b=/y=z"),
        ("--lora-modules", "a=/x", "--lora-modules", "b=/y=z", "--enable-lora"),
        ("--lora-modules", '{"name": "a", "path": "/x", "base_model_name": "m"}', "b=/y=z"),
    ],
)
def test_adapters_have_names_and_folders(arguments: tuple[str, ...]) -> None:
    assert _loras(*arguments) == [("a", "/x"), ("b", "/y=z")]


@pytest.mark.parametrize("key", ["lora", "lora-modules"])
def test_a_file_has_a_list_of_adapters(key: str, tmp_path: Path) -> None:
    file = tmp_path / "chairlift.toml"
    file.write_text(f'{key} = ["a=/x", "b=/y"]\n')
    assert _loras(file=file) == [("a", "/x"), ("b", "/y")]


def test_a_relative_folder_is_that_of_the_command_line() -> None:
    (lora,) = server_settings(_options("--lora", "a=x")).loras
    assert lora == LoraSource("a", Path.cwd() / "x")


def test_the_limits_reach_the_engine(tmp_path: Path) -> None:
    options = _options("--max-loras", "3", "--max-lora-rank", "16", "--lora-dir", str(tmp_path))
    config = engine_config(options)
    assert (config.max_loras, config.max_lora_rank) == (3, 16)
    assert server_settings(options).lora_dir == tmp_path
    assert server_settings(_options()).lora_dir is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lora", "a"), "'a' is not NAME=PATH"),
        (("--lora", "=x"), "'=x' is not NAME=PATH"),
        (("--lora", "a="), "'a=' is not NAME=PATH"),
        (("--lora-modules", '{"name": "a"}'), "has no name and path"),
        (("--lora-modules", "{"), "has no name and path"),
        (("--max-loras", "0"), "'0' is not a whole number above 0"),
        (("--lora-dir", __file__), "is not a directory"),
    ],
)
def test_bad_values_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _options(*arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lora", "a=x", "--lora", "a=y"), "two adapters have the same name"),
        (("--max-loras", "1", "--lora", "a=x", "--lora", "b=y"), "--max-loras is 1"),
    ],
)
def test_contradictions_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_settings(_options(*arguments))
