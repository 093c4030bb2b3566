"""Replies with drafts, greedy and sampled, go on unchanged after their engine was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support.engine.client.engine_client import until
from support.tiny import tiny_model_dir

from chairlift.engine.client.factory import make_client
from chairlift.engine.client.interface import EngineClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.messages.speculative_config import SpeculativeConfig

pytestmark = pytest.mark.system

PLAIN = EngineConfig(max_rows=8, kv_memory=32 << 20, prefix_cache_bytes=8 << 20, swap_memory=0)
STREAMS, LENGTH = 6, 400


class Run(NamedTuple):
    """A reply's tokens, and how many of them had been proposed."""

    tokens: list[int]
    accepted: int


async def _read(client: EngineClient, number: int, prediction: list[int], seen: list[int]) -> Run:
    prompt = [3 + (number * 7 + at % 6) % 200 for at in range(40)]
    params = SamplingParams(LENGTH, seed=number, temperature=0.8 * (number % 2))
    tokens: list[int] = []
    accepted = 0
    async with asyncio.timeout(120):
        request = Submit(f"r{number}", prompt, params, 1, 0.0, prediction=prediction)
        async for outputs in client.submit(request):
            for output in outputs:
                assert output.error is None
                tokens += output.token_ids
                accepted += output.accepted
                seen[number] = len(tokens)
    return Run(tokens, accepted)


async def _replies(
    model: Path, config: EngineConfig, predictions: list[list[int]], kill: bool
) -> list[Run]:
    source = ModelSource("tiny", "directory", model)
    supervision = Supervision(backoff=0.05, longest_backoff=0.2)
    client = make_client(config, source, "error", supervision=supervision)
    restarts: list[str] = []
    client.on_restart = restarts.append
    await client.start()
    try:
        while True:
            seen = [0] * STREAMS
            running = [
                asyncio.create_task(_read(client, number, prediction, seen))
                for number, prediction in enumerate(predictions)
            ]
            if not kill:
                break
            await until(lambda seen=seen: min(seen) > 40)
            assert client.pid is not None
            # What it has sent arrives first.
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)
            if max(seen) < LENGTH:
                os.kill(client.pid, signal.SIGKILL)
                break
            # A reply had ended already: again.
            os.kill(client.pid, signal.SIGCONT)
            await asyncio.gather(*running)
        runs = await asyncio.gather(*running)
        assert len(restarts) == kill
        return runs
    finally:
        await client.stop()


async def test_drafts_go_on_after_a_kill(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    expected = await _replies(model, PLAIN, [[]] * STREAMS, kill=False)
    assert all(len(run.tokens) == LENGTH for run in expected)
    # Predictions with a wrong token now and then.
    predictions = [
        [token if at % 9 else token // 2 for at, token in enumerate(run.tokens)] for run in expected
    ]
    drafting = replace(PLAIN, speculative=SpeculativeConfig())
    runs = await _replies(model, drafting, predictions, kill=True)
    assert [run.tokens for run in runs] == [run.tokens for run in expected]
    # How many drafts are worth their time depends on the machine.
    assert sum(run.accepted for run in runs) > 0
