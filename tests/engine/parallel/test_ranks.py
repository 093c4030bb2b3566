"""Two ranks over MLX's ring on this machine give the greedy tokens of one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from support.engine.client.engine_client import Client, drained, request, tokens_of, until
from support.processes import let_ranks_preempt
from support.tiny import tiny_config, tiny_model_dir

from chairlift.engine.client.local import LocalClient
from chairlift.engine.client.process_client import ProcessClient
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import StepStats, Submit

pytestmark = pytest.mark.system

# The sums of two ranks round otherwise than one rank's: after the first token whose log-probability
# is this close to the next token's, the two may differ.
TIE = 1e-3
SUPERVISION = Supervision(backoff=0.01)


@pytest.fixture(autouse=True)
def _ranks_preempt() -> None:
    let_ranks_preempt()


class Reply(NamedTuple):
    """Greedy tokens, and whether a rounding error could have decided each of them."""

    tokens: list[int]
    ties: list[bool]

    def assert_same(self, tokens: list[int]) -> int:
        """Compares up to the first tie; returns the number of compared tokens."""
        until_tie = (*self.ties, True).index(True)
        assert tokens[:until_tie] == self.tokens[:until_tie]
        assert len(tokens) == len(self.tokens)
        return until_tie


def prompts(count: int) -> list[list[int]]:
    """Random prompts; every other one begins like the others."""
    chosen = random.Random(0)
    return [
        [*range(10, 60)] * (number % 2) + [chosen.randrange(3, 250) for _ in range(9)]
        for number in range(count)
    ]


def submission(prompt: list[int], count: int) -> Submit:
    return request(prompt, max_tokens=count, logprobs=2)


async def replies(client: Client, requests: list[Submit]) -> list[Reply]:
    """The replies to requests that arrive one after the other while others run."""

    async def reply(number: int, submit: Submit) -> Reply:
        await asyncio.sleep(0.03 * number)
        outputs = (await drained(client.submit(submit)))[0]
        tops = [each.top for output in outputs for each in output.logprobs or ()]
        return Reply(tokens_of(outputs), [top[0][1] - top[1][1] < TIE for top in tops])

    return await asyncio.gather(*(reply(*each) for each in enumerate(requests)))


async def alone(path: Path, requests: list[Submit]) -> list[Reply]:
    """The replies of one rank with plenty of memory."""
    client = LocalClient(EngineConfig(dtype="float32", kv_memory=1 << 26), source(path))
    await client.start()
    try:
        return await replies(client, requests)
    finally:
        await client.stop()


@asynccontextmanager
async def two_ranks(path: Path, **config: Any) -> AsyncIterator[tuple[ProcessClient, list[Any]]]:
    """A client of an engine with two ranks, and the stats of its steps."""
    settings = EngineConfig(dtype="float32", tensor_parallel_size=2, prefill_slack=0.0, **config)
    client = ProcessClient(settings, source(path), supervision=SUPERVISION)
    stats: list[StepStats] = []
    client.on_step = stats.append
    try:
        await client.start()
        yield client, stats
    finally:
        await client.stop()


def source(path: Path) -> ModelSource:
    return ModelSource("tiny", "directory", path)


def followers(pid: int | None) -> list[int]:
    """The processes that an engine has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def registrations(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"))


async def test_two_ranks_and_a_killed_one(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    requests = [submission(prompt, 90) for prompt in prompts(5)]
    expected = await alone(path, requests)
    pids: list[int] = []
    # Two rows fit when they join, and one once both have grown.
    async with two_ranks(path, max_rows=6, kv_memory=420 * 256, prefix_cache_bytes=1 << 22) as (
        client,
        stats,
    ):
        left = client.submit(submission([9, 8, 7], 90))
        got = asyncio.create_task(replies(client, requests))
        await until(lambda: sum(each.decode_tokens for each in stats) > 40)
        left.close()
        compared = 0
        for reply, one in zip(await got, expected, strict=True):
            compared += one.assert_same(reply.tokens)
        assert compared > 225
        assert sum(each.preemptions for each in stats)
        assert sum(each.prefix_hits for each in stats)

        # A rank that is lost costs a restart of all, and no token.
        pid, (other,) = client.pid, followers(client.pid)
        pids += [pid or 0, other]
        # A rank that is killed leaves no file: it has removed the one by which OpenMP knows it.
        assert not registrations(pids[0]) + registrations(other)
        again = [submission(prompt, 40) for prompt in prompts(4)]
        got = asyncio.create_task(replies(client, again))
        stats.clear()
        await until(lambda: sum(each.decode_tokens for each in stats) > 30)
        os.kill(other, signal.SIGKILL)
        for reply, one in zip(await got, expected, strict=False):
            one = Reply(one.tokens[:40], one.ties[:40])
            one.assert_same(reply.tokens)
        assert client.pid not in (None, pid)

        # Not even a stopped rank outlives rank 0.
        pid, (other,) = client.pid, followers(client.pid)
        assert pid is not None
        pids += [pid, other]
        os.kill(other, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not runs(other))
    assert not [pid for pid in pids if registrations(pid)]


async def test_experts_on_two_ranks(tmp_path: Path) -> None:
    path = tiny_moe_dir(tmp_path)
    requests = [submission(prompt, 90) for prompt in prompts(5)]
    expected = await alone(path, requests)
    async with two_ranks(path, max_rows=6, kv_memory=420 * 256) as (client, stats):
        compared = 0
        for reply, one in zip(await replies(client, requests), expected, strict=True):
            compared += one.assert_same(reply.tokens)
    assert compared > 100
    assert sum(each.preemptions for each in stats)


def tiny_moe_dir(tmp_path: Path) -> Path:
    """A tiny qwen3_moe with four experts, of which each token takes two."""
    path = tiny_model_dir(tmp_path, "qwen3")
    config = tiny_config("qwen3") | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    key = mx.random.key(0)
    weights = {}
    for name, old in parameters:
        key, sub = mx.random.split(key)
        noise = mx.random.normal(old.shape, key=sub)
        weights[name] = 1 + 0.2 * noise if "norm" in name else noise * (1.5 / old.shape[-1] ** 0.5)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    return path
