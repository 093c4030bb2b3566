"""The shell, JSON, TOML and YAML of the documentation: parsed by what it is for, but not run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.paths import ROOT

from chairlift.api.admission.keys import NO_LIMITS, read_keys
from chairlift.api.cli.arguments import config_sources
from chairlift.api.cli.main import COMMANDS, build_parser
from chairlift.api.cli.model_specs import model_specs
from chairlift.api.cli.serve import add_arguments, server_settings
from chairlift.api.cluster.config import parse as parse_cluster
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.server.routes import ROUTES
from chairlift.engine.parallel.hostfile import read_hostfile

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]*\bchairlift [^`]*)`")
_WORDS_OF_SHELL = ("|", "&", "&&", ";", ">", "2>")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def _blocks() -> Iterator[Block]:
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        if DOCS / "notes" not in page.parents:
            for _, language, text in _BLOCK.findall(page.read_text()):
                yield Block(page.relative_to(ROOT).as_posix(), language, text)


BLOCKS = list(_blocks())


def _of(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{block.page}-{number}")
        for number, block in enumerate(BLOCKS)
        if block.language in languages
    ]


def _lines(text: str) -> list[list[str]]:
    """The commands of a block, each in words, without variables before them."""
    joined = re.sub(r"^\$ ", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    found = []
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # output of a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        ends = [words.index(word) for word in _WORDS_OF_SHELL if word in words]
        found.append(words[: min(ends, default=None)])
    return [words for words in found if words]


def _settings(text: str, folder: Path) -> Mapping[str, Any]:
    """What ``serve`` makes of a file of settings."""
    file = folder / "chairlift.toml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options, sourced = config_sources.resolve(parser, ["--config", str(file)], {})
    model_specs(parser, options, server_settings(options), sourced)
    return vars(options)


@pytest.mark.parametrize("block", _of("sh"))
def test_bash_can_read_it(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", _of("sh", "console"))
def test_commands_are_understood(block: Block) -> None:
    for words in _lines(block.text):
        if Path(words[0]).name == "chairlift":
            build_parser(COMMANDS).parse_args(words[1:])


def test_commands_within_the_text_are_understood() -> None:
    count = 0
    for page in sorted(DOCS.rglob("*.md")):
        if DOCS / "notes" in page.parents:
            continue
        for words in _lines("\n".join(_INLINE.findall(_BLOCK.sub("", page.read_text())))):
            if Path(words[0]).name != "chairlift" or "--help" in words[-1]:
                continue
            if words[1:] != ["cluster"]:  # it is about both of its actions
                build_parser(COMMANDS).parse_args(words[1:])
                count += 1
    assert count > 20


@pytest.mark.parametrize("block", _of("sh", "console"))
def test_curl_sends_what_its_route_takes(block: Block) -> None:
    for words in _lines(block.text):
        if words[0] != "curl" or "-d" not in words:
            continue
        (url,) = [word for word in words if re.match(r"(http://)?(127\.0\.0\.1|localhost):", word)]
        path = "/" + url.split(":8000/")[1]
        assert "Content-Type: application/json" in words or path.startswith("/api/")
        (request,) = [r.request for r in ROUTES if (r.method, r.path) == ("POST", path)]
        assert request is not None
        request.model_validate(json.loads(words[words.index("-d") + 1]))


@pytest.mark.parametrize("block", _of("toml"))
def test_toml_is_of_settings_keys_or_another_program(block: Block, tmp_path: Path) -> None:
    values = tomllib.loads(block.text)
    if block.page.endswith("clients/programs.md"):
        return  # test_guides.py
    if block.page.endswith("operations.md"):
        file = tmp_path / "keys.toml"
        file.write_text(block.text)
        assert {key.name for key in read_keys(file, NO_LIMITS)} == values.keys()
        return
    options = _settings(block.text, tmp_path)
    assert {key.replace("-", "_") for key in values} <= options.keys()


@pytest.mark.parametrize("block", _of("yaml"))
def test_yaml_is_of_a_cluster_or_another_program(block: Block) -> None:
    values = yaml.safe_load(block.text)
    if block.page.endswith("clients/programs.md") or block.page.endswith("libraries.md"):
        return  # test_guides.py
    match values:
        case {"applications": [{"args": arguments, "import_path": "chairlift.api.cluster:app"}]}:
            assert parse_cluster(arguments).models
        case {"models": _}:
            assert parse_cluster(values).models
        case {"autoscaling": _}:
            assert parse_cluster({"models": [{"model": "a", **values}]}).models
        case _:
            pytest.fail(f"neither a cluster nor its part: {values}")


@pytest.mark.parametrize("block", _of("json"))
def test_json_is_a_request_or_a_file_of_ours(block: Block, tmp_path: Path) -> None:
    values = json.loads(block.text)
    match values:
        case {"hosts": hosts}:
            file = tmp_path / "hosts.json"
            file.write_text(block.text)
            assert len(read_hostfile(file, len(hosts)).hosts) == len(hosts)
        case {"role": _}:
            ChatRequest.model_validate({"messages": [values]})
        case _:  # test_guide_requests.py
            assert block.page.startswith(("docs/guides/clients/", "docs/guides/apis.md"))
