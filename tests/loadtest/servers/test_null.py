"""The null-model benchmark, shortened, on a real server; and replies that make a run invalid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from chairlift.loadtest import null
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.servers import procfs

PROCESSES = ["engine process", "API process", "load generator"]


@pytest.mark.system
def test_it_measures_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "null.json"
    given = ["--streams", "8", "--output-tokens", "8", "--runs", "2", "--step-ms", "20"]
    assert null.main([*given, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert (figures["streams"], len(figures["runs"])) == (8, 2)
    printed = capsys.readouterr().out
    for run in figures["runs"]:
        assert run["tokens"] == 64
        assert run["seconds"] > 8 * 0.02
        assert run["tokens_per_second"] == pytest.approx(64 / run["seconds"])
        assert 0 < run["ttft_seconds"]["median"] < run["seconds"]
        assert f"{run['tokens_per_second']:.0f} tokens/s" in printed
        if procfs.available():
            assert list(run["cpu_us_per_token"]) == PROCESSES
    if procfs.available():
        assert sum(run["cpu_us_per_token"][PROCESSES[0]]["user"] for run in figures["runs"]) > 0


def complete_reply(count: int) -> Reply:
    times = [0.1 * step for step in range(count)]
    return Reply(16, chunk_times=times, usage_tokens=count, text=" word" * count)


def shared_event(reply: Reply) -> None:
    reply.chunk_times.pop()


def lost_text(reply: Reply) -> None:
    reply.text = reply.text.removesuffix(" word")


def wrong_usage(reply: Reply) -> None:
    reply.usage_tokens = 3


def failed(reply: Reply) -> None:
    reply.error = "HTTP 503"


@pytest.mark.parametrize("spoil", [shared_event, lost_text, wrong_usage, failed])
async def test_an_incomplete_reply_ends_the_run(spoil: Callable[[Reply], None]) -> None:
    class Client:
        async def complete(self, request: WorkloadRequest, on_chunk: Any) -> Reply:
            reply = complete_reply(request.output_len)
            if request.prompt.startswith(null.WORDS[1]):
                spoil(reply)
            return reply

    client = cast(OpenAIClient, Client())
    await null.run_streams(client, 1, 4, "complete")
    with pytest.raises(ServerError, match=r"HTTP 503|of 4 tokens"):
        await null.run_streams(client, 2, 4, "spoilt")
