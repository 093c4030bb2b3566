"""A streaming client for OpenAI-compatible servers that costs little and times every chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from chairlift.loadtest.errors import ServerError
from chairlift.loadtest.metrics import Reply
from chairlift.loadtest.sse import SSEParser
from chairlift.loadtest.workload import Request

# A whole reply, in seconds; vLLM's value: no load test of interest takes longer.
DEFAULT_TIMEOUT = 6 * 60 * 60.0
_CONNECT_TIMEOUT = 30.0
_ERROR_LENGTH = 300
# Servers close idle connections (llama.cpp's after 5 s), and a request sent at that moment is
# lost. So ours are closed first, after these seconds.
_KEEPALIVE = 1.0

# Called with the arrival of each chunk that carries a token, in ``time.perf_counter()`` seconds.
ChunkListener = Callable[[float], None]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """The fields of a chunk that the load test reads; msgspec skips the others unparsed."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _ReplyBuilder:
    """Puts a reply together from the events of its stream."""

    def __init__(self, reply: Reply, on_chunk: ChunkListener) -> None:
        self.reply = reply
        self.on_chunk = on_chunk
        self.texts: list[str] = []
        self.finished = False

    def add(self, data: bytes, now: float) -> None:
        """Takes one event that arrived at ``now``; puts a failure into ``reply.error``."""
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self.reply.error = (
                f"malformed event: {error}: {_shorten(data.decode(errors='replace'))}"
            )
            return
        if event.error is not None:
            self.reply.error = f"error event: {_error_text(event.error)}"
            return
        if event.usage is not None:
            self._add_usage(event.usage)
        if event.choices:
            self._add_choice(event.choices[0], now)

    def _add_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self.reply.usage_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.reply.prompt_tokens = usage.prompt_tokens

    def _add_choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        text = choice.text or ""
        if delta is not None:
            text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
        if choice.finish_reason is not None:
            self.finished = True
        # NOTE: the role's chunk comes before any token, and the chunk that only says why the
        # reply ended comes after all of them: counting either would flatter TTFT or ITL. A token
        # without text of its own (half a character, a special token) does count; and so does
        # the closing chunk of a reply whose tokens had no text at all.
        only_role = delta is not None and delta.role is not None
        only_end = choice.finish_reason is not None and bool(self.reply.chunk_times)
        if text or not (only_role or only_end):
            self.reply.chunk_times.append(now)
            self.on_chunk(now)
        self.reply.end = now
        if text:
            self.texts.append(text)

    def build(self) -> Reply:
        """The reply, with an error if its stream broke off."""
        self.reply.text = "".join(self.texts)
        if self.reply.ok and not self.finished:
            self.reply.error = "the stream ended before the reply did"
        elif self.reply.ok and not self.reply.chunk_times:
            self.reply.error = "the reply held no token"
        return self.reply


class OpenAIClient:
    """Sends requests to one endpoint of one server.

    ``base_url`` has no path; an ``endpoint`` that ends with /chat/completions gets the prompt as a
    user message. ``body`` is added to every request. ``timeout`` is seconds for a whole reply. Use
    it as an asynchronous context manager.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str = "/v1/completions",
        *,
        model: str | None = None,
        api_key: str | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._url = self.base_url + endpoint
        self._chat = endpoint.endswith("/chat/completions")
        self._body = dict(body or {})
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # The concurrency of a run is its own affair: the pool must not add a limit.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_TIMEOUT),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def complete(self, request: Request, on_chunk: ChunkListener = lambda now: None) -> Reply:
        """Sends a request and reads its reply to the end.

        Never raises for what the server does: a failure is the reply's ``error``.
        """
        payload = self._payload(request)
        reply = Reply(prompt_tokens=request.prompt_len)
        builder = _ReplyBuilder(reply, on_chunk)
        reply.start = reply.end = time.perf_counter()
        try:
            async with self._session.post(self._url, data=payload) as response:
                if response.status != 200:
                    reply.error = await _http_error(response)
                    return reply
                parser = SSEParser()
                async for chunk in response.content.iter_any():
                    now = time.perf_counter()
                    for data in parser.feed(chunk):
                        builder.add(data, now)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        return builder.build()

    def _payload(self, request: Request) -> bytes:
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.model is not None:
            body["model"] = self.model
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.output_len
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_len
        return msgspec.json.encode({**body, **self._body, **request.body})

    async def first_model(self) -> str:
        """The id of the first model the server lists.

        Raises:
            ServerError: it cannot be reached, or lists none.
        """
        url = f"{self.base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise ServerError(f"GET {url}: {await _http_error(response)}")
                models = await response.json(content_type=None)
            return str(models["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"cannot reach {url}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(f"GET {url} lists no model; name one with --model") from error

    async def count_tokens(self, text: str) -> int | None:
        """How many tokens the server makes of a text; None when it has no /tokenize.

        ``prompt`` is vLLM's and Chairlift's name for the text, ``content`` llama.cpp's.
        """
        for name in ("prompt", "content"):
            body = msgspec.json.encode({name: text, "add_special_tokens": True})
            try:
                async with self._session.post(f"{self.base_url}/tokenize", data=body) as response:
                    if response.status == 200:
                        tokens = (await response.json(content_type=None))["tokens"]
                        # llama.cpp answers a field it does not know with no tokens.
                        if tokens:
                            return len(tokens)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
                return None
        return None


async def _http_error(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        text = _error_text(msgspec.json.decode(text)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = _shorten(text)
    return f"HTTP {response.status} {response.reason}: {text}"


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message", error)
    return _shorten(str(error))


def _shorten(text: str) -> str:
    return text if len(text) <= _ERROR_LENGTH else text[:_ERROR_LENGTH] + "…"
