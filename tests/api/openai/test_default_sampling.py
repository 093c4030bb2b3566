"""Requests without a sampling field take the model's default, at every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from support.api.api_server import MESSAGES, Running, engine_replying, running

from chairlift.api.schemas.sampling_defaults import SamplingDefaults
from chairlift.engine.messages import SamplingParams

DEFAULTS = SamplingDefaults(
    temperature=0.25, top_p=0.75, top_k=7, min_p=0.125, repetition_penalty=1.5
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Say"},
    "/v1/responses": {"input": "Say"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
SENT = {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.25}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello"), defaults=DEFAULTS) as server:
        yield server


def sampling(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingDefaults.__struct_fields__}


async def sent(server: Running, path: str, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The sampling that reached the engine, and the reply."""
    status, reply = await server.post(path, {**BODIES[path], **fields})
    assert status == 200, reply
    return sampling(server.engine.submitted[-1].params), reply


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_takes_the_defaults(server: Running, path: str) -> None:
    expected = msgspec.structs.asdict(DEFAULTS)
    assert (await sent(server, path))[0] == expected
    assert (await sent(server, path, **dict.fromkeys(SENT)))[0] == expected


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", SENT)
async def test_a_given_field_wins(server: Running, path: str, name: str) -> None:
    expected = {**msgspec.structs.asdict(DEFAULTS), name: SENT[name]}
    assert (await sent(server, path, **{name: SENT[name]}))[0] == expected


@pytest.mark.parametrize("path", BODIES)
async def test_neutral_values_can_be_asked_for(server: Running, path: str) -> None:
    neutral = msgspec.structs.asdict(SamplingDefaults())
    assert (await sent(server, path, **neutral))[0] == neutral


async def test_a_response_repeats_the_sampling_in_effect(server: Running) -> None:
    _, reply = await sent(server, "/v1/responses")
    assert (reply["temperature"], reply["top_p"]) == (0.25, 0.75)
    _, reply = await sent(server, "/v1/responses", temperature=0)
    assert (reply["temperature"], reply["top_p"]) == (0, 0.75)


async def test_the_model_list_shows_the_defaults(server: Running) -> None:
    _, models = await server.get("/v1/models")
    assert models["data"][0]["default_sampling_params"] == msgspec.structs.asdict(DEFAULTS)
    _, card = await server.get("/v1/models/org/tiny")
    assert card == models["data"][0]


async def test_other_defaults_give_another_fingerprint(server: Running) -> None:
    _, reply = await sent(server, "/v1/completions")
    async with running(engine_replying("Hello")) as neutral:
        _, other = await sent(neutral, "/v1/completions")
    assert reply["system_fingerprint"] != other["system_fingerprint"]


@pytest.mark.parametrize(
    "defaults",
    [
        SamplingDefaults(temperature=0, top_p=0, top_k=-1, min_p=1, repetition_penalty=0.01),
        SamplingDefaults(temperature=2, top_k=2**31 - 1, repetition_penalty=100),
    ],
    ids=("lowest", "highest"),
)
@pytest.mark.parametrize("path", BODIES)
async def test_extreme_defaults_make_no_request_invalid(
    defaults: SamplingDefaults, path: str
) -> None:
    async with running(engine_replying("Hello"), defaults=defaults) as server:
        chosen, _ = await sent(server, path)
        # Fewer than one and more than all tokens both turn the filter off.
        assert chosen == {**msgspec.structs.asdict(defaults), "top_k": 0}
