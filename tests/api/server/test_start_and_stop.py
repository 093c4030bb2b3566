"""The real command: it ends on a signal, and refuses bad settings before anything slow."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest
from support.engine.fake_hub import Hub, serving
from support.engine.fetches import FILES, NAME, environment

from chairlift.api.admission.keys import NO_LIMITS, ApiKey
from chairlift.api.cli.main import main
from chairlift.api.models.spec import ModelsMemory, ModelSpec
from chairlift.api.server import serve
from chairlift.api.server.sockets import bind_all
from chairlift.api.settings import ServerSettings
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.loadtest.servers.ports import free_port

pytestmark = pytest.mark.system
CHAIRLIFT = Path(sys.executable).parent / "chairlift"
PATIENCE = 180.0


@contextmanager
def server_process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs ``chairlift serve`` of the model in ``folder``; gives the process and its URL."""
    port = free_port()
    process = subprocess.Popen(
        [CHAIRLIFT, "serve", str(folder), "--port", str(port), "--max-rows", "4", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def until_health(http: aiohttp.ClientSession, url: str, status: int = 200) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with http.get(f"{url}/health") as response:
                    if response.status == status:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


async def begin(http: aiohttp.ClientSession, url: str, tokens: int) -> aiohttp.ClientResponse:
    """Begins a streamed completion; returns once the server has accepted it.

    A request that comes after the server's signal is answered 503.
    """
    body = {"prompt": "ab" * 50, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    response = await http.post(f"{url}/v1/completions", json=body)
    assert response.status == 200, await response.text()
    return response


async def test_sigterm_finishes_streams_and_stores_prefixes(tiny: Path, tmp_path: Path) -> None:
    with server_process(tiny, "--prefix-cache-dir", str(tmp_path)) as (process, url):
        async with aiohttp.ClientSession() as http:
            await until_health(http, url)
            # Two of them wait for a row.
            streams = await asyncio.gather(*(begin(http, url, 200) for _ in range(6)))
            process.send_signal(signal.SIGTERM)
            for text in await asyncio.gather(*(stream.text() for stream in streams)):
                assert '"finish_reason":"length"' in text
                assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    assert list(tmp_path.rglob("*.safetensors"))  # noqa: ASYNC240


async def test_a_second_signal_ends_at_once(tiny: Path) -> None:
    with server_process(tiny) as (process, url):
        async with aiohttp.ClientSession() as http:
            await until_health(http, url)
            endless = await begin(http, url, 3500)
            process.send_signal(signal.SIGINT)
            await until_health(http, url, 503)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE) == 130
            assert time.monotonic() - began < 10, "the stream takes longer"
            with pytest.raises(aiohttp.ClientError):
                await endless.text()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_signal_during_the_imports_ends_the_command(name: str, code: int) -> None:
    starting = f"""
import os, signal, sys
from chairlift.api.cli.main import main

class Signal:
    def find_spec(self, module, *_):
        if module == "chairlift.api.cli.serve":
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, Signal())
main(["serve", "no/model"])
"""
    assert subprocess.run([sys.executable, "-c", starting], check=False).returncode == code


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 130), ("SIGHUP", 0)])
def test_a_signal_during_the_process_end_is_the_second_one(name: str, code: int) -> None:
    ending = f"""
import os, signal, uvloop
from chairlift.api.server.signals import handled

async def run():
    with handled(lambda: None, lambda: None):
        pass

uvloop.run(run())
os.kill(os.getpid(), signal.{name})
"""
    assert subprocess.run([sys.executable, "-c", ending], check=False).returncode == code


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_signal_ends_a_download(name: str, tmp_path: Path) -> None:
    """The hub's client fetches small files on threads of its own, large ones on the caller's."""
    with serving(Hub(NAME, FILES, stalls={name})) as hub:
        patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}
        log = tmp_path / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [CHAIRLIFT, "serve", NAME, "--port", "0"],
                stderr=errors,
                env={**os.environ, **environment(hub, tmp_path), **patient},
            ) as process,
        ):
            try:
                assert hub.half_sent.wait(PATIENCE), log.read_text()
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0, log.read_text()
            finally:
                process.kill()
    text = log.read_text()
    assert "stopping; requests have" in text
    assert "\x1b" not in text


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHAIRLIFT, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )


def test_bad_settings_are_one_line_before_the_model_is_looked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\nkey = 5\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["--port", str(port)], {}, f"cannot listen on 127.0.0.1:{port}: "),
            (
                ["--port", "0", "--metrics-port", str(port)],
                {},
                f"cannot listen on 127.0.0.1:{port}",
            ),
            (["--host", "192.0.2.1", "--port", "0"], {}, "cannot listen on 192.0.2.1:0"),
            (["--api-key-file", str(tmp_path / "none")], {}, "none: No such file"),
            (["--api-key-file", str(keys)], {}, "[alice]: key must be a string"),
            ([], {"CHAIRLIFT_API_KEY": "short"}, "CHAIRLIFT_API_KEY has fewer than"),
            (["--ssl-certfile", str(tmp_path / "c.pem")], {}, "c.pem: No such file"),
        ]
        for arguments, environment, said in cases:
            done = start("no/model", "--log-level", "error", *arguments, **environment)
            assert done.returncode == 1, done.stderr
            (line,) = done.stderr.splitlines()
            assert line.startswith("chairlift: error: ")
            assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--metrics-port", "8000"], "--metrics-port must not be --port"),
        (["--cors-origin", "example.org"], "is no origin like"),
        (["--rpm", "0"], "--rpm"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
    ],
)
def test_bad_flags_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "no/model", *arguments])
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("public", "keys", "warned"),
    [(True, (), True), (False, (), False), (True, (ApiKey("a", b"", NO_LIMITS),), False)],
)
async def test_a_public_server_without_a_key_warns(
    public: bool,
    keys: tuple[ApiKey, ...],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Only the loopback is bound.
    monkeypatch.setattr(serve, "is_loopback", lambda host: not public)
    settings = ServerSettings(port=0, keys=keys)
    specs = [ModelSpec(EngineConfig(), settings)]
    server = serve.Server(settings, specs, ModelsMemory(), Supervision(), bind_all(settings))
    async with AsyncExitStack() as stack:
        await server._listen(stack)
    assert any("there is no API key" in record.message for record in caplog.records) == warned
