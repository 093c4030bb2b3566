"""vLLM's flags of the target, and the tokenizer on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine import fake_hub
from support.fake_server import SMALL, FakeServer, bench, serving
from support.tiny import tiny_tokenizer

from chairlift.api.cli.arguments.parser import CommandParser
from chairlift.loadtest import cli
from chairlift.loadtest.bench.target import BACKENDS, Target, find_target
from chairlift.loadtest.errors import UsageError

ENDPOINTS = (None, "/v1/completions", "/v1/chat/completions", "/api/completions")


def run(*flags: str) -> int:
    parser = CommandParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(flags))


def test_the_defaults_are_those_of_vllm() -> None:
    default = Target("openai", "http://127.0.0.1:8000", "/v1/completions")
    assert find_target(None, None, None, None, None) == default
    assert find_target("openai", None, "127.0.0.1", 8000, None) == default
    assert find_target("vllm", None, None, None, None) == default._replace(backend="vllm")
    chats = find_target("openai-chat", None, None, None, None)
    assert chats == default._replace(backend="openai-chat", endpoint="/v1/chat/completions")
    assert find_target(None, None, None, None, "/v1/chat/completions") == chats


@given(
    st.sampled_from([None, *BACKENDS]),
    st.sampled_from(["127.0.0.1", "::1", "[::1]", "gpu-box.local"]),
    st.integers(1, 65535),
    st.sampled_from(ENDPOINTS),
)
def test_backend_and_endpoint_agree(
    backend: str | None, host: str, port: int, endpoint: str | None
) -> None:
    chats = "chat" in (endpoint or "")
    if None not in (backend, endpoint) and chats != (backend == "openai-chat"):
        with pytest.raises(UsageError, match=f"--backend {backend} sends"):
            find_target(backend, None, host, port, endpoint)
        return
    target = find_target(backend, None, host, port, endpoint)
    assert (target.backend == "openai-chat") == ("chat" in target.endpoint)
    assert backend in (None, target.backend)
    assert endpoint in (None, target.endpoint)
    parts = urlsplit(target.base_url)
    assert (parts.hostname, parts.port) == (host.strip("[]"), port)
    assert find_target(backend, target.base_url, None, None, endpoint) == target


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--base-url", "http://a:1", "--host", "b"), "leave --host out"),
        (("--base-url", "http://a:1", "--port", "8000"), "leave --port out"),
        (("--base-url", "localhost:8000"), "must have the form http://"),
        (("--base-url", "ftp://a"), "must have the form http://"),
        (("--base-url", "http://a:b"), "must have the form http://"),
        (("--base-url", "http://[::1"), "must have the form http://"),
        (("--base-url", "http://a:1/v1/"), "must not end in /v1"),
        (("--port", "0"), "--port must be between"),
        (("--port", "65536"), "--port must be between"),
        (("--host", "http://a"), "--host http://a"),
        (("--host", ""), "--host"),
        (("--host", "localhost:8000"), "--port takes the port"),
        (("--host", "[::1]:8000"), "--port takes the port"),
        (("--endpoint", "completions"), "must begin with /"),
        (("--endpoint", "/v1/responses"), "end with /completions"),
        (("--backend", "vllm", "--endpoint", "/v1/chat/completions"), "vllm sends texts"),
        (("--backend", "openai-chat", "--endpoint", "/v1/completions"), "sends chats"),
        (("--tokenizer", "/nowhere/at all"), "--tokenizer /nowhere/at all: neither a file"),
    ],
)
def test_wrong_targets_are_refused_in_one_line(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", "m", *flags) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_other_backends_are_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--backend", "tensorrt-llm")
    assert ended.value.code == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert "--backend" in err
    assert all(backend in err for backend in BACKENDS)


def test_host_port_and_backend_reach_the_server(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    with serving(FakeServer()) as fake:
        port = str(urlsplit(fake.base_url).port)
        for backend in BACKENDS:
            flags = ("--backend", backend, "--save-result", "--result-filename", str(result))
            assert run("--host", "127.0.0.1", "--port", port, *SMALL, *flags) == cli.EXIT_OK
            assert ("messages" in fake.bodies[-1]) == (backend == "openai-chat")
            assert json.loads(result.read_text())["backend"] == backend


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_local_tokenizer_counts_the_prompts(tmp_path: Path, name: str) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    flags = ("--num-prompts", "3", "--random-input-len", "40", "--random-output-len", "2")
    with serving(FakeServer()) as fake:
        assert bench(fake, *flags, "--tokenizer", str(tmp_path / name)) == cli.EXIT_OK
    # One token a byte; the server's own tokenizer counts words. Prompts end with a whole word.
    assert all(abs(len(body["prompt"]) - 40) < 15 for body in fake.bodies)


def test_a_tokenizer_of_the_hub_is_downloaded_without_a_bar_in_the_pipe(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from chairlift.loadtest.bench.tokenizer import local_counter;"
        "print(asyncio.run(local_counter(sys.argv[1])('four')))"
    )
    hub = fake_hub.Hub("org/tiny", {"tokenizer.json": tiny_tokenizer().to_str().encode()})
    with fake_hub.serving(hub):
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        for name, code in (("org/tiny", 0), ("org/other", 1)):
            done = subprocess.run(
                [sys.executable, "-c", script, name],
                env=variables,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == code, done.stderr
            if code == 0:
                assert (done.stdout, done.stderr) == ("4\n", "")
            else:
                last = done.stderr.splitlines()[-1]
                assert "UsageError: --tokenizer org/other: neither a file" in last


@pytest.mark.parametrize(("text", "complaint"), [("{", "cannot be read"), (None, "the folder has")])
def test_a_bad_tokenizer_is_one_line(
    tmp_path: Path, text: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with serving(FakeServer()) as fake:
        assert bench(fake, *SMALL, "--tokenizer", str(tmp_path)) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
