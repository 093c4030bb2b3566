"""The real server reads a generation config at its start, and shows or refuses it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import aiohttp
import pytest
from support.api.server_process import server_process
from support.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to which a test adds a generation config."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


async def test_the_defaults_are_shown_and_all_end_ids_end_a_reply(
    model: Path, tmp_path: Path
) -> None:
    config = {"temperature": 0.5, "top_k": 9, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(config))
    # Every token ends a reply, so each has one.
    override = {"temperature": 0, "eos_token_id": list(range(VOCAB_SIZE))}
    flags = ("--override-generation-config", json.dumps(override))
    with server_process(tmp_path, model, *flags) as server:
        await server.healthy()
        async with aiohttp.ClientSession(server.url) as http:
            async with http.get("/v1/models") as reply:
                (card,) = (await reply.json())["data"]
            body = {"prompt": "a", "max_tokens": 5}
            async with http.post("/v1/completions", json=body) as reply:
                completion = await reply.json()
        assert card["default_sampling_params"] == {
            **{"temperature": 0.0, "top_p": 1.0, "top_k": 9},
            **{"min_p": 0.0, "repetition_penalty": 1.0},
        }
        assert completion["choices"][0]["finish_reason"] == "stop"
        assert completion["usage"]["completion_tokens"] == 1
        path = model / "generation_config.json"
        line = f"default sampling: temperature 0, top_k 9 ({path}, --override-generation-config)"
        assert line in server.said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"temperature": 2.5}', "temperature is 2.5, but should be less than or equal to 2; "),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', but should be a token id"),
        ("{", "damaged, this is not JSON: "),
    ],
)
async def test_a_wrong_config_ends_the_server_with_one_line(
    model: Path, tmp_path: Path, config: str, message: str
) -> None:
    path = model / "generation_config.json"
    path.write_text(config)
    with server_process(tmp_path, model) as server:
        assert await asyncio.wait_for(server.exit_code(), 180) == 1
        (line,) = [line for line in server.said.splitlines() if "error" in line]
        assert line.startswith(f"chairlift: error: {path}: {message}")
        assert "Traceback" not in server.said
