"""The examples of docs/guides/cookbook.md, run unchanged against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

from chairlift.loadtest.servers.child import ChildServer, ServerSpec, free_port

CHAIRLIFT = str(Path(sys.executable).parent / "chairlift")
COOKBOOK = (ROOT / "docs" / "guides" / "cookbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", COOKBOOK, re.MULTILINE))
ADDRESS = "http://127.0.0.1:8000"
# The output of each section, for any reply of the model.
PRINTED = {
    "openai-python": r"Paris.*\n\d+ tokens\n"
    r"weather +\{.*\"city\".*\n"
    r"name=.* country=.*\n"
    r"576 numbers\n$",
    "Anthropic's SDK": r"\w.*\n\d+ tokens\n$",
    "LangChain": r"Paris.*name=.* country=.*\nweather\n$",
    "LiteLLM": r"Paris",
}


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = [CHAIRLIFT, "serve", "--port", str(port), "--max-rows", "4"]
    with ChildServer(ServerSpec("cookbook", command, port), 120):
        yield f"http://127.0.0.1:{port}"


def test_every_example_has_an_expected_output() -> None:
    assert {name for name in SECTIONS if blocks(name, "python")} == PRINTED.keys()


@pytest.mark.system
@pytest.mark.parametrize("section", PRINTED)
def test_an_example_runs_unchanged(section: str, url: str) -> None:
    script = "".join(blocks(section, "python"))
    assert ADDRESS in script
    done = subprocess.run(
        [sys.executable, "-"],
        input=script.replace(ADDRESS, url),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[section], done.stdout, re.DOTALL), done.stdout


def test_settings_of_other_programs_have_this_servers_address() -> None:
    (proxy,) = map(yaml.safe_load, blocks("LiteLLM", "yaml"))
    assert proxy["model_list"][0]["litellm_params"]["api_base"] == f"{ADDRESS}/v1"
    (editor,) = map(yaml.safe_load, blocks("Continue", "yaml"))
    assert editor["models"][0]["apiBase"] == f"{ADDRESS}/v1"
