"""The fault scenarios on a tiny model: they report faults, and only faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.fake_server import FakeServer, serving
from support.tiny import tiny_model_dir

from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.faults.__main__ import main
from chairlift.loadtest.faults.kill import _compare_replies
from chairlift.loadtest.faults.streams import Streams


@pytest.mark.system
async def test_kill(tmp_path: Path) -> None:
    model, out = tiny_model_dir(tmp_path, "llama"), tmp_path / "figures.json"
    arguments = (
        *("kill", "--model", str(model), "--out", str(out), "--streams", "4"),
        *("--output-tokens", "200", "--kills", "1", "--engine-timeout", "20"),
        # With this seed both signals are due after the same tokens.
        *("--seed", "28"),
    )
    assert await asyncio.to_thread(main, arguments) == 0
    figures = json.loads(out.read_text())
    assert figures["tokens"] == 4 * 200
    assert len(figures["blows"]) == 3
    assert all(blow["pause_seconds"] > 0.5 for blow in figures["blows"])


async def test_streams_that_are_refused_are_reported_at_once() -> None:
    with serving(FakeServer(fail=lambda prompt: True)) as fake:
        async with OpenAIClient(fake.base_url) as client:
            with pytest.raises(ServerError, match="a stream failed: HTTP 429"):
                async with asyncio.timeout(20), Streams(client, 2, 5):
                    pass


def test_lost_and_different_replies_are_reported() -> None:
    def reply(text: str, error: str = "") -> Reply:
        return Reply(3, chunk_times=[1.0], text=text, error=error)

    alone = [reply("a"), reply("b"), reply("c")]
    complete, same = _compare_replies(alone, alone)
    assert complete.passed
    assert same.passed
    complete, same = _compare_replies(alone, [reply("a"), reply("x"), reply("c", "HTTP 503")])
    assert (complete.passed, complete.found) == (False, "2 of 3; HTTP 503")
    assert (same.passed, same.found) == (False, "1 of 3")
