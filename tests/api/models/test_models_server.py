"""Three real models behind one server with memory for two, and with engines that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.server_process import PATIENCE, ServerProcess, linux, server_process, until
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import tiny_model, tiny_model_dir

pytestmark = pytest.mark.system

REQUESTS = 60
AT_ONCE = 30
NAMES = ("plain", "other", "file")


@asynccontextmanager
async def three_models(folder: Path) -> AsyncIterator[ServerProcess]:
    """Three lazy models; an engine takes 0.26 GB for its steps, so the memory is for two."""
    paths = [tiny_model_dir(folder, "llama"), tiny_model_dir(folder, "qwen3")]
    paths.append(folder / "file.gguf")
    write_tiny_gguf(paths[-1], "llama", tiny_model("llama", seed=1, vocab_size=GGUF_VOCAB_SIZE))
    tables = "".join(
        f'[[models]]\nmodel = "{path}"\nserved-model-name = "{name}"\nload = "lazy"\n'
        for name, path in zip(NAMES, paths, strict=True)
    )
    file = folder / "serve.toml"
    file.write_text(f'models-memory = "700M"\nkv-memory = "16M"\nmax-context = 512\n{tables}')
    # The file in place of a model names them all.
    with server_process(folder, f"--config={file}") as server:
        await server.healthy()
        yield server


class Client:
    """Sends requests to one server."""

    def __init__(self, server: ServerProcess, http: aiohttp.ClientSession) -> None:
        self._url = server.url
        self._http = http

    async def complete(self, model: str, number: int, tokens: int = 12) -> str:
        """The greedy continuation of a prompt of that number; fails unless the reply is whole."""
        body = {
            "model": model,
            "prompt": f"Number {number} is",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
            assert reply["model"] == model
            assert reply["usage"]["completion_tokens"] == tokens
            text: str = reply["choices"][0]["text"]
            return text

    async def post(self, path: str) -> Any:
        async with self._http.post(self._url + path) as response:
            return response.status, await response.json()

    async def formats(self) -> dict[str, str]:
        """The format of each model's files, as Ollama's clients see it."""
        async with self._http.get(f"{self._url}/api/tags") as response:
            models = (await response.json())["models"]
        return {
            model["name"].removesuffix(":latest"): model["details"]["format"] for model in models
        }

    async def metric(self, name: str, **labels: str) -> float:
        async with self._http.get(f"{self._url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def engines(server: ServerProcess) -> set[int]:
    """The process ids of the engines."""
    found = set()
    for pid in server.children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"chairlift.engine" in command:
                found.add(pid)
    return found


@linux
async def test_three_models_share_memory_for_two_and_survive_kills(tmp_path: Path) -> None:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        three_models(tmp_path) as server,
        aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as http,
    ):
        client = Client(server, http)
        assert not engines(server), "lazy models are not loaded at the start"
        replies: dict[tuple[str, int], set[str]] = {}
        served = Counter[str]()
        for first in range(0, REQUESTS, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            asked = [(NAMES[number % 3], number // 3 % 10) for number in numbers]
            texts = await asyncio.gather(*(client.complete(*one) for one in asked))
            for (name, prompt), text in zip(asked, texts, strict=True):
                replies.setdefault((name, prompt), set()).add(text)
                served[name] += 1
            assert len(engines(server)) <= 2
        assert served == dict.fromkeys(NAMES, REQUESTS // 3)
        # The same prompt has the same reply before and after an eviction, and each model its own.
        assert all(len(texts) == 1 for texts in replies.values())
        assert len({min(replies[name, 0]) for name in NAMES}) == 3
        assert await client.formats() == dict(
            zip(NAMES, ("safetensors", "safetensors", "gguf"), strict=True)
        )
        evictions = await client.metric("chairlift_model_unloads_total", reason="memory")
        loads = await client.metric("chairlift_model_loads_total", outcome="success")
        assert evictions >= 1
        assert 3 + evictions - 2 <= loads <= 3 + evictions, "each load but the last two was evicted"
        for name in NAMES:
            assert (await client.post(f"/v1/models/{name}/unload"))[0] == 200
        pids = {name: await _loaded(server, client, name) for name in NAMES[:2]}
        pids[NAMES[0]] = await _killed_under_load(server, client, NAMES[:2], pids[NAMES[0]])
        await _killed_under_load(server, client, (NAMES[1], NAMES[0]), pids[NAMES[1]])
        assert (await client.post(f"/v1/models/{NAMES[0]}/unload"))[0] == 200
        pid = await _loaded(server, client, NAMES[2])
        await _killed_under_load(server, client, (NAMES[2], NAMES[1]), pid)
        assert await client.metric("chairlift_engine_restarts_total", reason="crash") == 3
        assert await client.metric("vllm:request_success_total", finished_reason="error") == 0
        server.signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert not engines_alive(server)


async def _loaded(server: ServerProcess, client: Client, name: str) -> int:
    """Loads a model; returns its engine's process id."""
    before = engines(server)
    assert (await client.post(f"/v1/models/{name}/load"))[0] == 200
    [pid] = engines(server) - before
    return pid


async def _killed_under_load(
    server: ServerProcess, client: Client, names: tuple[str, ...], victim: int
) -> int:
    """Kills the first model's engine while it and another one generate; returns the next engine.

    All replies stay the same.
    """
    asked = [(name, number, 96) for name in names for number in range(4)]
    undisturbed = await asyncio.gather(*(client.complete(*one) for one in asked))
    generated = {"name": "vllm:generation_tokens_total", "model_name": names[0]}
    while True:
        before = await client.metric(**generated)
        running = asyncio.gather(*(client.complete(*one) for one in asked))
        while not running.done() and await client.metric(**generated) < before + 8:
            pass
        if not running.done():
            break
        # This process was stopped for so long that all replies were complete: again.
        assert await running == undisturbed
    others = engines(server) - {victim}
    os.kill(victim, signal.SIGKILL)
    assert await running == undisturbed
    # If the replies were complete before the kill, the next engine may still be starting.
    await until(lambda: engines(server) - others - {victim})
    [following] = engines(server) - others - {victim}
    assert others < engines(server), "the other model's engine went on"
    return following


def engines_alive(server: ServerProcess) -> set[int]:
    """The engines that outlived their server."""
    return {pid for pid in server.children if Path(f"/proc/{pid}").exists()}
