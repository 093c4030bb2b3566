"""The configuration of a cluster: flags, names, and errors of one line."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT

from chairlift.api.cli.main import main
from chairlift.api.cluster.config import ClusterConfigError, parse

ONE = {"model": "a"}


def test_arguments_of_a_replica() -> None:
    flags = {"max-rows": 8, "trust-remote-code": True, "cors-origin": ["https://a", "-b"]}
    config = parse(
        {
            "models": [{**ONE, "name": "n", "flags": flags, "tensor_parallel_size": 2}],
            "api_key_file": "/keys.toml",
        }
    )
    [model] = config.models
    arguments = [*model.serve_arguments(), *config.server_arguments()]
    assert arguments == [
        *("a", "--served-model-name", "n", "--no-ui", "--drain-timeout", "300"),
        *("--tensor-parallel-size", "2", "--max-rows=8", "--trust-remote-code"),
        *("--cors-origin=https://a", "--cors-origin=-b"),
        *("--max-body-bytes", "16777216", "--api-key-file", "/keys.toml"),
    ]
    assert model.reserved_gpus == 2.0


def test_one_device_reserves_no_gpu_unless_told() -> None:
    assert parse({"models": [ONE]}).models[0].reserved_gpus == 0.0
    assert parse({"models": [{**ONE, "num_gpus": 0.5}]}).models[0].reserved_gpus == 0.5


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (None, "must be a mapping"),
        ({"models": ["org/name"]}, "models.0: must be a mapping, with lines like 'name: value'"),
        ({"models": [{"model": "a", "flags": "x"}]}, "models.0.flags: must be a mapping"),
        ({}, "models"),
        ({"models": []}, "models"),
        ({"models": [{**ONE, "replica": 2}]}, "models.0.replica: there is no such field"),
        ({"models": [ONE, ONE]}, "two models are named 'a'"),
        ({"models": [{**ONE, "flags": {"port": 1}}]}, "models.0.flags: port cannot be set"),
        ({"models": [{**ONE, "flags": {"--max-rows": 1}}]}, "without dashes"),
        ({"models": [{**ONE, "flags": {"no-canary": False}}]}, "leave the flag out"),
        ({"models": [{**ONE, "name": " b"}]}, "models.0.name: ' b' cannot name a model"),
        ({"models": [{**ONE, "replicas": 0}]}, "models.0.replicas"),
        ({"models": [{**ONE, "replicas": 2, "autoscaling": {"max_replicas": 2}}]}, "exclude"),
        ({"models": [{**ONE, "autoscaling": {"min_replicas": 3, "max_replicas": 2}}]}, "below"),
        ({"models": [{**ONE, "autoscaling": {"max_replicas": 2, "x": 1}}]}, "autoscaling.x"),
    ],
)
def test_errors_are_one_line(values: Any, place: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        parse(values)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "not valid YAML"),
        ("applications: []", "serve deploy"),
        ("models: [{model: a, nme: b}]", "models.0.nme: there is no such field"),
    ],
)
def test_command_names_the_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert main(["cluster", "deploy", str(file)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"chairlift cluster: error: {file}: ")
    assert message in line


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "deploy", str(tmp_path / "none.yaml")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_without_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.api.cli.cluster.find_spec", lambda name: None)
    assert main(["cluster", "status"]) == 1
    assert "pip install 'chairlift[ray]'" in capsys.readouterr().err


def test_manifest_of_kuberay() -> None:
    """Its application is valid, and its pods outlive a replica's drain."""
    manifest = yaml.safe_load((ROOT / "docs/deploy/rayservice.yaml").read_text())
    spec = manifest["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))
    config = parse(application["args"])
    [workers] = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    [container] = pod["containers"]
    for model in config.models:
        assert pod["terminationGracePeriodSeconds"] > model.stop_seconds
        assert float(container["resources"]["limits"]["cpu"]) >= model.num_cpus
    heads = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for each in (*heads, container) for mount in each["volumeMounts"]}
    assert str(config.api_key_file).startswith(tuple(mounts))


def test_examples_of_the_guide() -> None:
    """Every YAML block that lists models is a valid configuration."""
    page = (ROOT / "docs/guides/cluster.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) == 3
    for block in blocks:
        if "autoscaling" in block:
            block = {"models": [{**ONE, **block}]}
        for args in [each["args"] for each in block.get("applications", [])] or [block]:
            parse(args)
