"""The flags for replicas, from the command line and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.api.cli.arguments.config_sources import ConfigError, resolve
from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.api.cli.serve import add_arguments, engine_config
from chairlift.engine.config import EngineConfig


def config_of(*arguments: str, **environment: str) -> EngineConfig:
    parser = CommandParser(prog="chairlift serve")
    add_arguments(parser)
    return engine_config(resolve(parser, arguments, environment).options)


def test_devices_imply_replicas(tmp_path: Path) -> None:
    file = tmp_path / "chairlift.toml"
    file.write_text('devices = ["GPU-8f0a", 3]')
    for config, devices in (
        (config_of(), None),
        (config_of("--replicas", "2"), None),
        (config_of("--data-parallel-size", "2"), None),
        (config_of("--devices", "0, 1"), ("0", "1")),
        (config_of("--devices", "0", "--devices", "1", "--replicas", "2"), ("0", "1")),
        (config_of(CHAIRLIFT_DEVICES="1,0"), ("1", "0")),
        (config_of("--config", str(file)), ("GPU-8f0a", "3")),
    ):
        assert config.devices == devices
    assert (config_of().replicas, config_of("--replicas", "2").replicas) == (1, 2)
    assert config_of("--devices", "0,1,1").replicas == 3


def test_contradictions_and_nonsense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 devices for 3 replicas"):
        config_of("--devices", "0,1", "--replicas", "3")
    with pytest.raises(ValueError, match="1 to 64"):
        config_of("--replicas", "65")
    for nonsense in ("", "0,", "0 1", "cuda:0", "-1", "1234", "0;1", "⓪"):
        with pytest.raises((SystemExit, ConfigError)):
            config_of("--devices", nonsense)
        if nonsense:
            with pytest.raises(ConfigError, match="is not a list of devices"):
                config_of(CHAIRLIFT_DEVICES=nonsense)
