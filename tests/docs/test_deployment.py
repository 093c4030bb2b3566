"""The files of docs/deploy and the Containerfile: what they start, mount and wait for is there."""

from __future__ import annotations

import argparse
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT
from support.prometheus import promtool

from chairlift.api.admission.keys import KEY_VARIABLE
from chairlift.api.cli import serve
from chairlift.api.cli.arguments.config_sources import Resolved, resolve
from chairlift.api.settings import ServerSettings

DEPLOY = ROOT / "docs" / "deploy"
BIN = Path(sys.executable).parent
# What ends a server takes this many seconds beyond the drain (docs/guides/operations.md).
AFTER_DRAIN = 15
# Variables of ours that are no flags (docs/guides/commands.md).
NO_FLAGS = {KEY_VARIABLE, "CHAIRLIFT_CACHE", "CHAIRLIFT_BLAS"}

PLIST = plistlib.loads((DEPLOY / "chairlift.plist").read_bytes())
UNIT = (DEPLOY / "chairlift.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CONTAINERFILE = (ROOT / "Containerfile").read_text().replace("\\\n", "")
KEYS = '[somebody]\nkey = "sk-something-long"\n'


def unit(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def container_variables() -> dict[str, str]:
    lines = re.findall(r"^ENV (.*)$", CONTAINERFILE, re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in shlex.split(line))


def serves(command: Sequence[str], environment: Mapping[str, str], keys: Path) -> Resolved:
    """What ``serve`` makes of a command and its variables, which all have to be ones it knows."""
    program, subcommand, *flags = command
    assert (Path(program).name, subcommand) == ("chairlift", "serve")
    settings = keys.with_name("chairlift.toml")
    settings.write_text("port = 8080\n")
    places = {"/etc/chairlift/chairlift.toml": settings, "/opt/chairlift/etc/keys.toml": keys}
    places |= {"/opt/chairlift/etc/chairlift.toml": settings}
    flags = [str(places.get(flag, flag)) for flag in flags]
    ours = {name: value for name, value in environment.items() if name.startswith("CHAIRLIFT_")}
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    result = resolve(parser, flags, ours)
    sources = {setting.source for setting in result.settings}
    assert ours.keys() - NO_FLAGS <= sources
    if settings in map(Path, flags):
        assert result.options.port == 8080
    return result


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return file


def test_systemd_starts_what_there_is_and_waits_for_the_drain(keys: Path) -> None:
    (command,) = unit("ExecStart")
    environment = dict(variable.split("=", 1) for variable in unit("Environment"))
    result = serves(command.split(), environment, keys)
    assert str(result.options.api_key_file) == "/etc/chairlift/keys.toml"
    assert int(unit("TimeoutStopSec")[0]) >= result.options.drain_timeout + AFTER_DRAIN
    assert unit("KillMode") == ["mixed"]
    (cache,), (state,) = unit("CacheDirectory"), unit("StateDirectory")
    # Clients' files cannot be made again, so they are not where caches are cleaned.
    assert environment["CHAIRLIFT_FILE_DIR"].startswith(f"%S/{state}")
    for name in ("CHAIRLIFT_CACHE", "CHAIRLIFT_PREFIX_CACHE_DIR", "HF_HOME"):
        assert environment[name].startswith(f"%C/{cache}")


def test_systemd_has_keys_read_again_that_the_service_may_read() -> None:
    assert unit("ExecReload") == ["/bin/kill -HUP $MAINPID"]
    # Credentials are copied at the start, so that a reload would find the old ones.
    assert not unit("LoadCredential")
    (group,) = unit("SupplementaryGroups")
    page = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    assert f"groupadd --system {group}\n" in page
    assert f"install -m 640 -g {group} keys.toml /etc/chairlift/keys.toml\n" in page


def test_systemd_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    here = tmp_path / "chairlift.service"
    here.write_text(UNIT.replace("/opt/chairlift/bin/chairlift", str(BIN / "chairlift")))
    done = subprocess.run(
        ["systemd-analyze", "verify", here],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_launchd_starts_what_there_is_and_waits_for_the_drain(keys: Path) -> None:
    result = serves(PLIST["ProgramArguments"], PLIST.get("EnvironmentVariables", {}), keys)
    assert result.options.api_key_file == keys
    assert PLIST["ExitTimeOut"] >= result.options.drain_timeout + AFTER_DRAIN
    assert PLIST["KeepAlive"] == {"SuccessfulExit": False}


def test_hadolint_finds_nothing_wrong_with_the_containerfile() -> None:
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "Containerfile"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_all_that_is_installed() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", CONTAINERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-dir"] == {"": "src"}
    linked = {p.resolve().name for p in (ROOT / "src" / "chairlift").iterdir() if p.is_symlink()}
    assert linked | {"src"} <= copied
    licenses = set(project["project"]["license-files"])
    assert licenses | {"pyproject.toml", "setup.py", "README.md"} <= copied
    (extra,) = re.findall(r"^ARG EXTRA=(.*)$", CONTAINERFILE, re.MULTILINE)
    named = [*extra.split(","), cuda()["args"]["EXTRA"], "cuda12", "otel"]
    assert set(named) <= project["project"]["optional-dependencies"].keys()


def cuda() -> dict[str, Any]:
    """How the image for GPUs is built."""
    build = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
    return dict(build["services"]["chairlift"]["build"])


def test_the_container_serves_as_nobody_special_and_keeps_what_it_fetches(keys: Path) -> None:
    image = [json_list(name) for name in ("ENTRYPOINT", "CMD")]
    serves([*image[0], *image[1]], container_variables(), keys)
    (user,) = re.findall(r"^USER (\d+)$", CONTAINERFILE, re.MULTILINE)
    assert f"--uid {user} " in CONTAINERFILE
    (volume,) = re.findall(r"^VOLUME (.*)$", CONTAINERFILE, re.MULTILINE)
    variables = container_variables()
    for name in ("CHAIRLIFT_CACHE", "CHAIRLIFT_PREFIX_CACHE_DIR", "HF_HOME"):
        assert variables[name].startswith(f"{volume}/")
    assert f"EXPOSE {ServerSettings().port}\n" in CONTAINERFILE


def json_list(instruction: str) -> list[str]:
    (found,) = re.findall(rf"^{instruction} (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    return list(yaml.safe_load(found))


def test_compose_mounts_what_there_is_and_waits_for_the_drain(keys: Path) -> None:
    services = COMPOSE["services"]
    chairlift = services["chairlift"]
    command = [*json_list("ENTRYPOINT"), *chairlift["command"]]
    result = serves(command, container_variables() | chairlift["environment"], keys)
    grace = int(chairlift["stop_grace_period"].removesuffix("s"))
    assert grace >= result.options.drain_timeout + AFTER_DRAIN
    (secret,) = chairlift["secrets"]
    assert str(result.options.api_key_file) == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"].keys() == {secret}
    build = chairlift["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(ROOT / "Containerfile")
    for service in services.values():
        for source, *_ in (volume.split(":") for volume in service["volumes"]):
            assert (DEPLOY / source).is_file() if "/" in source else source in COMPOSE["volumes"]
        # Whoever is to be reached from elsewhere is opened by hand.
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def mounted(service: str) -> dict[str, Path]:
    """Files of ours by where a service finds them."""
    volumes = (volume.split(":") for volume in COMPOSE["services"][service]["volumes"])
    return {target: DEPLOY / source for source, target, *_ in volumes if "/" in source}


@pytest.mark.parametrize(
    ("version", "module", "line"),
    [
        ("3, 10", "sys", "Chairlift needs Python 3.11 or newer, and {} is 3.10"),
        ("3, 13", "no_such_module", "{} makes no virtual environments: install python3-venv"),
    ],
)
def test_make_says_in_a_line_what_is_missing(
    tmp_path: Path, version: str, module: str, line: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = ({version}); exec(sys.argv[1].replace('ensurepip', "
    python.write_text(f"""#!/bin/sh\nexec {sys.executable} -c "{code}'{module}'))" "$2"\n""")
    python.chmod(0o755)
    for name, told in ((str(python), line), ("no-such-python", "there is no {}: install Python")):
        done = subprocess.run(
            ["make", "--silent", "setup", f"PYTHON={name}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 2
        lines = (done.stdout + done.stderr).splitlines()
        # Make itself adds that it ends.
        (said,) = (line for line in lines if not line.startswith("make"))
        assert said.startswith(told.format(name))


def test_prometheus_and_grafana_are_told_where_things_are(tmp_path: Path) -> None:
    files = mounted("prometheus")
    config = files["/etc/prometheus/prometheus.yml"].read_text()
    settings = yaml.safe_load(config)
    assert settings["rule_files"] == ["/etc/prometheus/alerts.yml"]
    (scrape,) = settings["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"chairlift:{ServerSettings().port}"]}]
    here = tmp_path / "prometheus.yml"
    for place, file in files.items():
        config = config.replace(place, str(file.resolve()))
    here.write_text(config)
    checked = promtool("check", "config", here)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout

    files = mounted("grafana")
    provisioning = "/etc/grafana/provisioning"
    sources = yaml.safe_load(files[f"{provisioning}/datasources/chairlift.yml"].read_text())
    (source,) = sources["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    boards = yaml.safe_load(files[f"{provisioning}/dashboards/chairlift.yml"].read_text())
    (provider,) = boards["providers"]
    folder = provider["options"]["path"]
    assert files[f"{folder}/chairlift.json"].samefile(ROOT / "metrics" / "grafana.json")
