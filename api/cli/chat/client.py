"""A client for streamed chat completions, for the terminal chat."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import aiohttp

from chairlift.api.http.event_parser import SSEParser

# Limits connecting only: a reply may take any time.
CONNECT_SECONDS = 10.0
# Limits fetching a file.
FETCH_SECONDS = 60.0
# Tokens that arrive within fewer seconds come from one read: they tell no speed of the model.
SHORTEST = 0.05
_NO_CHUNK = "the server sent something else than a chunk of a reply"


class ChatError(Exception):
    """The server cannot be reached, refuses the request or breaks off. The message is one line."""


class NoServer(ChatError):
    """Nothing listens at the server's address."""


class TextDelta(NamedTuple):
    """New text of the reply, or of the model's reasoning if ``is_thought``."""

    text: str
    is_thought: bool


@dataclass(slots=True)
class Speed:
    """The timing of one reply, in ``time.monotonic()`` seconds.

    Attributes:
        begin: when the request started.
        first: when the first text arrived, or None.
        last: when the last text arrived.
        tokens: the server's count of output tokens.
    """

    begin: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    tokens: int | None = None

    def __str__(self) -> str:
        if self.first is None:
            return "no token"
        words = [f"first token after {self.first - self.begin:.2f} s"]
        if self.tokens is not None:
            words.insert(0, f"{self.tokens} token{'s' * (self.tokens != 1)}")
            seconds = self.last - self.first
            if self.tokens > 1 and seconds >= SHORTEST:
                rate = (self.tokens - 1) / seconds
                words.append(f"then {rate:.1f} tokens/s")
        return ", ".join(words)

    def note_text(self) -> None:
        """Records that text has arrived now."""
        self.last = time.monotonic()
        self.first = self.first or self.last


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A client of one server.

    ``base_url`` is its address, with or without /v1 at the end. ``api_key`` may be None.
    """

    base_url: str
    api_key: str | None

    async def model_ids(self) -> list[str]:
        """Returns the ids of the models that the server lists, at least one.

        Raises:
            ChatError: the server lists none or cannot be reached.
        """
        return [str(model["id"]) for model in await self.models()]

    async def models(self) -> list[dict[str, Any]]:
        """Returns the models that the server lists, at least one, each with an "id".

        Raises:
            ChatError: the server lists none or cannot be reached.
        """
        async with self._request("GET", "v1/models", None) as response:
            body = await response.json()
        models = body.get("data") if isinstance(body, dict) else None
        if not models or not isinstance(models, list) or not all(map(_has_id, models)):
            raise ChatError(f"{self.base_url} lists no model")
        return models

    async def sees(self, model: str) -> bool:
        """Whether a model takes images. A server that does not say so may.

        Raises:
            ChatError: as ``models``.
        """
        cards = (card for card in await self.models() if card["id"] == model)
        modalities = next((card.get("input_modalities") for card in cards), None)
        return not isinstance(modalities, list) or "image" in modalities

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Fetches a file from another server; of a larger one, ``max_bytes`` and one more.

        Raises:
            ChatError: it cannot be fetched.
        """
        timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS)
        try:
            # NOTE: a session of its own, because the API key is for the server alone.
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url) as response,
            ):
                if response.status != 200:
                    raise ChatError(f"{url}: its server replies {response.status}")
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > max_bytes:
                        break
                return bytes(content[: max_bytes + 1])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ChatError(f"cannot fetch {url}: {error or type(error).__name__}") from error

    async def change_model(self, name: str, action: Literal["load", "unload"]) -> dict[str, Any]:
        """Loads or unloads a model; returns it as the server lists it.

        Raises:
            ChatError: the server cannot be reached, or refuses it.
        """
        path = f"v1/models/{quote(name)}/{action}"
        async with self._request("POST", path, None) as response:
            model = await response.json()
        if not _has_id(model):
            raise ChatError(f"{self.base_url} did not describe the model")
        return dict(model)

    async def is_healthy(self) -> bool:
        """Whether the server answers and has loaded its model."""
        try:
            async with self._request("GET", "health", None):
                return True
        except ChatError:
            return False

    async def reply(
        self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], speed: Speed
    ) -> AsyncGenerator[TextDelta]:
        """Streams the reply to ``messages``, and records its timing in ``speed``.

        ``body`` holds the request's other fields.

        Raises:
            ChatError: the server cannot be reached, refused the request or broke off.
        """
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        request = {**body, "messages": messages, **streamed}
        async with self._request("POST", "v1/chat/completions", request) as response:
            parser = SSEParser()
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        return
                    for delta in _text_deltas(json.loads(event), speed):
                        yield delta
        raise ChatError("the stream ended before the reply did")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        url = f"{self.base_url.rstrip('/').removesuffix('/v1')}/{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, url, json=body) as response,
            ):
                if response.status != 200:
                    raise ChatError(_refusal(response.status, await response.text()))
                yield response
        except aiohttp.ClientSSLError as error:
            raise ChatError(f"{url}: {error}") from error
        except aiohttp.ClientConnectorError as error:
            raise NoServer(
                f"no server answers at {self.base_url}: start one with 'chairlift serve', or name "
                "another with --base-url"
            ) from error
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise ChatError(f"{url}: {error or type(error).__name__}") from error


def _has_id(model: object) -> bool:
    return isinstance(model, dict) and "id" in model


def _text_deltas(chunk: Any, speed: Speed) -> list[TextDelta]:
    """The texts of a chunk, which may be anything if the server is not Chairlift.

    Raises:
        ChatError: it is an error, or no chunk of a reply.
    """
    if not isinstance(chunk, dict):
        raise ChatError(_NO_CHUNK)
    if (error := chunk.get("error")) is not None:
        raise ChatError(_message(error))
    match chunk.get("usage"):
        case {"completion_tokens": int(tokens)}:
            speed.tokens = tokens
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise ChatError(_NO_CHUNK)
    deltas = []
    for choice in choices:
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise ChatError(_NO_CHUNK)
        for name, is_thought in (("reasoning_content", True), ("content", False)):
            text = delta.get(name)
            if not isinstance(text, str | None):
                raise ChatError(_NO_CHUNK)
            if text:
                deltas.append(TextDelta(text, is_thought))
    if deltas:
        speed.note_text()
    return deltas


def _refusal(status: int, text: str) -> str:
    try:
        message = _message(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(text.split())[:200]
    hint = " (--api-key, CHAIRLIFT_API_KEY)" if status == 401 else ""
    return f"the server answered {status}: {message}{hint}"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
