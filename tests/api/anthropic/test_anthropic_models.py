"""GET /v1/models and /v1/models/{id} in Anthropic's form, and for Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest
from support.api.pool_server import PoolServer, pool_server
from support.api.simulated_models import lazy

from chairlift.api.models.entry import ModelPlan

PLANS = (ModelPlan("org/a", aliases=("gpt-4o",), memory=1), lazy("b"), lazy("c"))
ANTHROPIC = {"anthropic-version": "2023-06-01"}
FIRST = {
    "type": "model",
    "id": "org/a",
    "display_name": "org/a",
    "lifecycle": "active",
    "max_input_tokens": 2048,
    "max_tokens": 2048,
}


@pytest.fixture
async def server() -> AsyncIterator[PoolServer]:
    async with pool_server(PLANS, budget=2) as server:
        yield server


async def test_anthropics_client_lists_and_describes_models(server: PoolServer) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        pages = await client.models.list(limit=2)
        assert ([model.id for model in pages.data], pages.has_more) == (["org/a", "b"], True)
        assert [model.id async for model in client.models.list(limit=1)] == ["org/a", "b", "c"]
        backwards = await client.models.list(limit=1, before_id="c")
        assert ([model.id for model in backwards.data], backwards.has_more) == (["b"], True)
        assert backwards.first_id == backwards.last_id == "b"
        for name in ("org/a", "gpt-4o"):
            model = await client.models.retrieve(name)
            assert (model.id, model.display_name, model.type) == ("org/a", "org/a", "model")
            assert model.created_at.timestamp() == server.entry("org/a").last.created
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("d")
        assert (missing.value.type, bool(missing.value.request_id)) == ("not_found_error", True)
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            await client.models.list(after_id="d")


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", ["org/a", "b", "c"], False),
        ("?limit=3", ["org/a", "b", "c"], False),
        ("?limit=2", ["org/a", "b"], True),
        ("?after_id=org/a&limit=1", ["b"], True),
        ("?after_id=b", ["c"], False),
        ("?after_id=c", [], False),
        ("?before_id=org/a", [], False),
        ("?before_id=c", ["org/a", "b"], False),
        ("?before_id=c&limit=1", ["b"], True),
    ],
)
async def test_pages(server: PoolServer, query: str, ids: list[str], has_more: bool) -> None:
    async with server.http.get(f"{server.url}/v1/models{query}", headers=ANTHROPIC) as response:
        page = await response.json()
    assert (page["has_more"], [model["id"] for model in page["data"]]) == (has_more, ids)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    if "org/a" in ids:
        created = page["data"][0].pop("created_at")
        assert page["data"][0] == FIRST
        assert created.endswith("Z")


@pytest.mark.parametrize("query", ["?limit=0", "?limit=1001", "?limit=x", "?before_id=d"])
async def test_wrong_pages_are_refused_in_anthropics_form(server: PoolServer, query: str) -> None:
    async with server.http.get(f"{server.url}/v1/models{query}", headers=ANTHROPIC) as response:
        reply = await response.json()
        assert (response.status, reply["type"]) == (400, "error")
        assert response.headers["request-id"] == reply["request_id"]
    assert reply["error"]["type"] == "invalid_request_error"


async def test_other_clients_get_openais_form(server: PoolServer) -> None:
    _, listed = await server.get("/v1/models?limit=1")
    assert (listed["object"], len(listed["data"])) == ("list", 3)
    _, card = await server.get("/v1/models/org/a")
    assert card["object"] == "model"
    _, missing = await server.get("/v1/models/d")
    assert missing["error"]["code"] == "model_not_found"
