"""instructor, unmodified: models of pydantic in its modes for OpenAI's servers.

Its modes without a grammar for the model's schema are among test_recorded_requests.py's requests.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from support.api.server import Server
from support.api.weather_question import MODEL

pytestmark = pytest.mark.system

MODES = ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Home(BaseModel):
    town: str = Field(max_length=20)


class Person(BaseModel):
    """A person. Its schema allows other properties, too."""

    role: Literal["guest", "host"]
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    home: Home | None


ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Who is Ada?"}],
    "max_tokens": 1500,
    "temperature": 0,
    # No second try: the first reply has to fit.
    "max_retries": 0,
}


@pytest.fixture
async def openai(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


@pytest.fixture
def client(request: pytest.FixtureRequest, openai: AsyncOpenAI) -> Any:
    """instructor's client, imported here since that takes seconds."""
    instructor = importlib.import_module("instructor")
    return instructor.from_openai(openai, mode=instructor.Mode[request.param])


@pytest.mark.parametrize("client", MODES, indirect=True)
async def test_a_reply_is_a_person(client: Any) -> None:
    person, raw = await client.create_with_completion(response_model=Person, **ASK)
    assert isinstance(person, Person)
    assert raw.usage.total_tokens > 0


@pytest.mark.parametrize("client", MODES, indirect=True)
async def test_a_person_streams(client: Any) -> None:
    partial = [part async for part in client.create_partial(response_model=Person, **ASK)]
    assert len(partial) > 3
    assert partial[0].role is None
    Person.model_validate(partial[-1].model_dump())
