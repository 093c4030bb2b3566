"""The real server as a process, with the default model unless a test names another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from chairlift.engine.config import DEFAULT_MODEL
from chairlift.loadtest.servers.ports import free_port

CHAIRLIFT = Path(sys.executable).parent / "chairlift"
PATIENCE = 120.0
GREEDY: Mapping[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0}
SAMPLED: Mapping[str, Any] = {"model": DEFAULT_MODEL, "temperature": 1.0, "max_tokens": 16}


@dataclass
class Server:
    """A healthy server process."""

    process: subprocess.Popen[bytes]
    url: str

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="-",
            max_retries=0,
            timeout=PATIENCE,
            _strict_response_validation=True,
        )

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as reply:
            return Metrics.parse(reply.read().decode())


@dataclass
class Metrics:
    """One scrape: the names of the metric families, and all samples by name."""

    families: set[str] = field(default_factory=set)
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        metrics = cls()
        for family in text_string_to_metric_families(text):
            metrics.families.add(family.name)
            for sample in family.samples:
                metrics.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return metrics

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples that carry these labels."""
        return sum(
            value for given, value in self.samples.get(name, []) if labels.items() <= given.items()
        )


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """Runs ``chairlift serve``, ends it with SIGTERM, and checks its exit code and log."""
    port = free_port()
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [CHAIRLIFT, "serve", "--port", str(port), *arguments],
            stdout=output,
            stderr=output,
        )
        try:
            server = Server(process, f"http://127.0.0.1:{port}")
            wait_until_healthy(server, log)
            yield server
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
    written = log.read_text()
    for trouble in ("Traceback", "Fatal", " ERROR ", "Warning"):
        assert trouble not in written, written


def wait_until_healthy(server: Server, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert server.process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=PATIENCE):
                return
        except urllib.error.HTTPError as loading:
            loading.close()
        except urllib.error.URLError:
            pass  # not listening yet
        time.sleep(0.05)


async def until_metric(server: Server, name: str, value: float, **labels: str) -> Metrics:
    """Scrapes until a metric has this value, and returns that scrape."""
    deadline = time.monotonic() + PATIENCE
    while (metrics := server.metrics()).total(name, **labels) != value:
        assert time.monotonic() < deadline, f"{name} is not {value}"
        await asyncio.sleep(0.02)
    return metrics


def lenient(client: AsyncOpenAI) -> AsyncOpenAI:
    """A client for completion streams.

    NOTE: The strict client refuses the null finish_reason that OpenAI's own completions stream.
    """
    return client.with_options(_extra_kwargs={"_strict_response_validation": False})


async def token_ids(client: AsyncOpenAI, text: str) -> list[int]:
    root = str(client.base_url).removesuffix("/v1/")
    reply = await client.post(f"{root}/tokenize", body={"prompt": text}, cast_to=object)
    assert isinstance(reply, dict)
    tokens: list[int] = reply["tokens"]
    return tokens


async def streamed(client: AsyncOpenAI, prompt: str, **options: Any) -> tuple[list[str], str]:
    """Streams a completion; returns its pieces of text and its finish reason."""
    pieces: list[str] = []
    finishes: list[str] = []
    stream = await lenient(client).completions.create(prompt=prompt, stream=True, **options)
    async with stream:
        async for chunk in stream:
            pieces += [choice.text for choice in chunk.choices if choice.text]
            finishes += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    (finish,) = finishes
    return pieces, finish
