"""/v1/rerank and /v1/score are refused by the model's name, as at vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_server import engine_replying, running

RERANK = {"query": "snow", "documents": ["ice", {"text": "fire"}], "top_n": 1}
SCORE = {"text_1": "snow", "text_2": ["ice", "fire"]}


@pytest.mark.parametrize(
    ("path", "body", "api"),
    [
        ("/v1/rerank", RERANK, "Rerank"),
        ("/rerank", RERANK, "Rerank"),
        ("/v2/rerank", RERANK, "Rerank"),
        ("/v1/score", SCORE, "Score"),
        ("/score", SCORE, "Score"),
    ],
)
async def test_generation_models_are_refused_by_name(
    path: str, body: dict[str, Any], api: str
) -> None:
    async with running(engine_replying("Hello")) as server:
        status, reply = await server.post(path, {"model": "org/tiny", **body})
        assert (status, reply["error"]["param"]) == (400, "model")
        message = reply["error"]["message"]
        assert message.startswith(f"the model 'org/tiny' does not support the {api} API")
        assert (await server.post(path, {"model": "other", **body}))[0] == 404
        assert (await server.post(path, [body]))[0] == 400
        assert not server.engine.submitted
