"""Runs minutes of mixed load with clients that disconnect or do not read: nothing may leak."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.data.words import WORDS
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.faults.scenario import Check, Outcome, Scenario
from chairlift.loadtest.faults.streams import child, drop, metric, until_metric
from chairlift.loadtest.servers import procfs
from chairlift.loadtest.servers.child import ChildServer

# Fractions of the clients that disconnect, and that do not read their reply.
LEAVING = 0.20
NOT_READING = 0.05
# Relative growth of a process's memory that is allowed over the last third.
MAX_GROWTH = 0.02
# Small enough to be full long before the last third, so that growth there is a leak.
PREFIX_BYTES = 64 << 20
SLOW_READER_SECONDS = 5.0
_PROMPTS = 200
_SETTLE_SECONDS = 60.0
_SAMPLE_SECONDS = 1.0
# Too large for the kernel's buffers to hold a reply that the client does not read.
_UNREAD_TOKENS = 1000


@dataclass(slots=True)
class Soak:
    """The measurements.

    Attributes:
        done: requests by the client's behaviour.
        errors: errors of requests that should have completed.
        resident: resident bytes of each process at each sample.
    """

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    resident: dict[str, list[int]] = field(default_factory=dict)

    def growth(self, process: str) -> float:
        """The relative growth of a process over the last third, from a linear fit."""
        samples = self.resident[process]
        third = np.array(samples[len(samples) * 2 // 3 :], dtype=float)
        if len(third) < 2:
            return 0.0
        slope = float(np.polyfit(np.arange(len(third)), third, 1)[0])
        return slope * (len(third) - 1) / float(third.mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the scenario's flags."""
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="duration of the load (default: %(default)g)")
    add("--clients", type=int, default=24, help="concurrent clients (default: %(default)s)")
    add("--rows", type=int, default=16, help="rows of the batch (default: %(default)s)")


def run(model: Path, options: argparse.Namespace) -> Outcome:
    """Loads the server and checks what is left afterwards."""
    if not procfs.available():
        raise ServerError("this needs a /proc to read the memory of processes")
    flags = (
        *("--max-rows", str(options.rows), "--prefix-cache-bytes", str(PREFIX_BYTES)),
        *("--kv-memory", "1G", "--slow-reader-timeout", str(SLOW_READER_SECONDS)),
    )
    with child(model, *flags) as server:
        return uvloop.run(_soak(server, options))


async def _soak(server: ChildServer, options: argparse.Namespace) -> Outcome:
    url = server.spec.base_url
    soak = Soak()
    draw = random.Random(options.seed)
    prompts = [_prompt(draw) for _ in range(_PROMPTS)]
    end = time.monotonic() + options.minutes * 60
    async with OpenAIClient(url, body={"ignore_eos": True}) as client:
        client.model = await client.first_model()
        sampler = asyncio.create_task(_sample(server.pid, soak))
        await asyncio.gather(
            *(
                _client(client, prompts, random.Random(f"{options.seed} {number}"), end, soak)
                for number in range(options.clients)
            )
        )
        sampler.cancel()
    running = await until_metric(url, "vllm:num_requests_running", 0, _SETTLE_SECONDS)
    waiting = await until_metric(url, "vllm:num_requests_waiting", 0, _SETTLE_SECONDS)
    used = await until_metric(url, "chairlift_kv_bytes", 0, _SETTLE_SECONDS, state="used")
    prefix = await metric(url, "chairlift_kv_bytes", state="prefix")
    reserved = await metric(url, "chairlift_kv_bytes", state="reserved")
    left = await metric(url, "chairlift_client_disconnects_total")
    growth = {process: soak.growth(process) for process in soak.resident}
    grown = ", ".join(f"{process} {part:+.2%}" for process, part in growth.items())
    checks = [
        Check("no errors", not soak.errors, f"{len(soak.errors)} {soak.errors[:3]}"),
        Check("no rows are left", running == 0, f"{running:g}"),
        Check("nothing is queued", waiting == 0, f"{waiting:g}"),
        Check("only the prefix cache uses KV memory", used == 0, f"{used:g} bytes"),
        Check("the prefix cache keeps its limit", prefix <= PREFIX_BYTES, f"{prefix / 1e6:.1f} MB"),
        Check("disconnects were counted", left > 0, f"{left:g} of {soak.done['left']}"),
        Check(
            f"memory grows by less than {MAX_GROWTH:.0%} in the last third",
            all(part < MAX_GROWTH for part in growth.values()),
            grown,
        ),
    ]
    figures = {
        "minutes": options.minutes,
        "requests": dict(soak.done),
        "disconnects": left,
        "kv_bytes": {"used": used, "prefix": prefix, "reserved": reserved},
        "growth": growth,
        "resident_bytes": {name: values[-1] for name, values in soak.resident.items()},
    }
    return Outcome(figures, [f"{soak.done.total()} requests: {dict(soak.done)}"], checks)


async def _client(
    client: OpenAIClient, prompts: list[str], draw: random.Random, end: float, soak: Soak
) -> None:
    """Sends one request after the other."""
    while time.monotonic() < end:
        prompt = draw.choice(prompts)
        request = WorkloadRequest(prompt, len(prompt.split()), draw.randint(4, 64))
        kind = draw.random()
        if kind < NOT_READING:
            soak.done["not read"] += 1
            await _do_not_read(client, request)
        elif kind < NOT_READING + LEAVING:
            soak.done["left"] += 1
            task = asyncio.create_task(client.complete(request))
            await asyncio.sleep(draw.expovariate(1.0))
            await drop(task)
        else:
            soak.done["whole"] += 1
            reply = await client.complete(request)
            if reply.output_tokens != request.output_len:
                soak.errors.append(reply.error or f"{reply.output_tokens} tokens")


async def _do_not_read(client: OpenAIClient, request: WorkloadRequest) -> None:
    """Requests a long reply and keeps the connection open without reading."""
    address = urlsplit(client.base_url)
    fields = {"prompt": request.prompt, "max_tokens": _UNREAD_TOKENS, "logprobs": 20}
    body = json.dumps({**fields, "stream": True, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.setblocking(False)
        await loop.sock_connect(unread, (address.hostname, address.port))
        await loop.sock_sendall(unread, head.encode() + body)
        await asyncio.sleep(SLOW_READER_SECONDS * 4)


async def _sample(server: int, soak: Soak) -> None:
    """Samples the memory of both processes, until cancelled."""
    while True:
        api, engine = procfs.without_workers(procfs.tree(server))[:2]
        for name, pid in (("API process", api), ("engine process", engine)):
            soak.resident.setdefault(name, []).append(procfs.resident_bytes(pid))
        await asyncio.sleep(_SAMPLE_SECONDS)


def _prompt(draw: random.Random) -> str:
    """A prompt; many share a prefix, and lengths vary."""
    begin = " ".join(WORDS[:40]) if draw.random() < 0.3 else ""
    return begin + " ".join(draw.choices(WORDS, k=draw.choice((3, 10, 40, 120))))


SOAK = Scenario("soak", "minutes of mixed load, with clients that misbehave", add_arguments, run)
