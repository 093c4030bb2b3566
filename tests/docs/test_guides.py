"""The examples of the guides, run unchanged against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.guides import ADDRESS, CLIENTS, SECTIONS, blocks
from support.paths import ROOT
from support.scripts import run_scripts

from chairlift.loadtest.servers.child import ChildServer, ServerSpec
from chairlift.loadtest.servers.ports import free_port

CHAIRLIFT = str(Path(sys.executable).parent / "chairlift")
DOCS = ROOT / "docs"
# How many scripts run at a time: the more, the fewer steps compute all replies.
AT_ONCE = 16
# The scripts: the blocks of a section about a client, or of another page, one after the other.
PAGES = {
    page.relative_to(DOCS).as_posix(): page.read_text()
    for page in sorted(DOCS.rglob("*.md"))
    if not {CLIENTS, DOCS / "notes"} & set(page.parents)
}
TEXTS = {**SECTIONS, **PAGES}
# The output of each script, for any reply of the model.
PRINTED = {
    "openai-python": r"Paris.*\n\d+ tokens\n"
    r"weather +\{.*\"city\".*\n"
    r"name=.* country=.*\n"
    r"576 numbers\n$",
    "Anthropic's SDK": r"\w.*\n\d+ tokens\n$",
    "LangChain": r"Paris.*name=.* country=.*\nweather\n$",
    "LiteLLM": r"Paris",
    "OpenAI's Agents SDK": r"^.*: sunny, 21 degrees\n.*Paris.*\n$",
    "pydantic-ai": r"^name='Paris' country=.*\n.*: sunny, 21 degrees\n$",
    "instructor": r"^name='Paris' country=.*\n(name=.*\n){3,}$",
    "LlamaIndex": r"^.*Paris.*\n.*\nname=.* country=.*\n$",
    "DSPy": r"^Paris\n$",
    "smolagents": r"Paris: sunny, 21 degrees\n$",
    "guides/apis.md": r"^\w.*\n.*\w.*\n",
    "guides/chat.md": r"^get_weather \{.*\"city\".*\}\n.",
    "guides/embeddings.md": r"^576\n$",
    "guides/speculative-decoding.md": r"CompletionTokensDetails\(accepted_prediction_tokens=\d+,",
    "guides/structured.md": r"^name=.* country=.* lifts=\d+\n(positive|negative)\n"
    r"\d\d?:\d\d [ap]m\nTake the (red|blue) lift.\n$",
    "start/quickstart.md": r"^\S.*\n$",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    files = str(tmp_path_factory.mktemp("files"))
    command = [CHAIRLIFT, "serve", "--port", str(port), "--max-rows", str(AT_ONCE)]
    command += ["--file-dir", files]
    with ChildServer(ServerSpec("guides", command, port), 120):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def runs(
    url: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Runs the selected scripts beside each other: the model computes their replies in batches."""
    selected = {
        item.callspec.params["name"]: tmp_path_factory.mktemp("example") / "example.py"
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_an_example_runs_unchanged
    }
    for name, file in selected.items():
        script = "".join(blocks(TEXTS[name], "python"))
        assert ADDRESS in script
        # smolagents reads the source of a tool from its file.
        file.write_text(script.replace(ADDRESS, url))
    done = run_scripts(list(selected.values()), at_once=AT_ONCE)
    return {name: done[file] for name, file in selected.items()}


def test_every_example_has_an_expected_output() -> None:
    assert {name for name in TEXTS if blocks(TEXTS[name], "python")} == PRINTED.keys()


@pytest.mark.system
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_unchanged(
    name: str, runs: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    done = runs[name]
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout, re.DOTALL), done.stdout


def test_settings_of_other_programs_have_this_servers_address() -> None:
    (proxy,) = map(yaml.safe_load, blocks(SECTIONS["LiteLLM"], "yaml"))
    assert proxy["model_list"][0]["litellm_params"]["api_base"] == f"{ADDRESS}/v1"
    (editor,) = map(yaml.safe_load, blocks(SECTIONS["Continue"], "yaml"))
    assert editor["models"][0]["apiBase"] == f"{ADDRESS}/v1"
    (agent,) = map(tomllib.loads, blocks(SECTIONS["Agents that speak Responses"], "toml"))
    assert agent["model_providers"][agent["model_provider"]]["base_url"] == f"{ADDRESS}/v1"
    (variables,) = blocks(SECTIONS["Agents that speak Messages"], "sh")
    assert f"ANTHROPIC_BASE_URL={ADDRESS}\n" in variables
