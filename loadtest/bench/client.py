"""A streaming client for OpenAI-compatible servers that is cheap and times every chunk."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from chairlift.api.http.event_parser import SSEParser
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.stream import ChunkListener, ReplyBuilder, error_text, shorten
from chairlift.loadtest.bench.target import is_chat
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError

# Seconds for a complete reply; vLLM's value, longer than any reply of interest.
DEFAULT_TIMEOUT = 6 * 60 * 60.0
_CONNECT_TIMEOUT = 30.0
_FETCH_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
# Seconds until the client closes an idle connection. It must do so before the server does
# (llama.cpp: after 5 s), because a request sent at that moment would be lost.
_KEEPALIVE = 1.0
# Receive buffer of a slow reader, in bytes. With a larger one, the server would not notice that the
# client reads slowly. Linux doubles the requested size.
_SLOW_BUFFER = 2048
# Reads per second of a slow reader.
_SLOW_READS = 4
# Seconds for the end of a response after the stream's last event. A server that keeps it open
# longer loses the connection, not the reply.
_END_TIMEOUT = 1.0
# Bytes of a response without events that an error shows.
_SHOWN_BYTES = 1024


class OpenAIClient:
    """Sends requests to one endpoint of one server. Use it as an asynchronous context manager.

    Args:
        base_url: the server's address; it may have a path, which precedes all others.
        endpoint: the path of requests. One that ends with /chat/completions gets the prompt as a
            user message.
        model: the model's name in requests; None: the field is left out.
        api_key: the bearer token.
        body: fields that are added to every request.
        timeout: limit for a complete reply, in seconds.
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
        self._chat = is_chat(endpoint)
        # The names of the text's field in /tokenize: all, then the one that the server knows.
        self._text_fields: tuple[str, ...] = ("prompt", "content")
        self._body = dict(body or {})
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        session = partial(
            aiohttp.ClientSession,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_TIMEOUT),
        )
        # The run limits its concurrency itself; the connection pools must not.
        self._session = session(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE)
        )
        self._slow_session = session(
            connector=aiohttp.TCPConnector(
                limit=0, force_close=True, socket_factory=_small_buffer_socket
            ),
            read_bufsize=_SLOW_BUFFER,
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
        await self._slow_session.close()

    async def complete(
        self, request: WorkloadRequest, on_chunk: ChunkListener = lambda now: None
    ) -> Reply:
        """Sends a request and reads its reply to the end, or until the request's cancellation.

        Never raises because of the server: a failure is reported in the reply's ``error``, and
        ``end`` is then when it was noticed.
        """
        payload = self._payload(request)
        slow = request.bytes_per_s is not None
        reply = Reply(prompt_tokens=request.prompt_len, slow=slow)
        builder = ReplyBuilder(reply, on_chunk)
        session = self._slow_session if slow else self._session
        reply.start = reply.end = time.perf_counter()
        try:
            async with session.post(self._url, data=payload) as response:
                if response.method != "POST":
                    reply.error = _redirect_error(response)
                elif response.status != 200:
                    reply.error = await _http_error(response)
                else:
                    await self._read(request, response, builder)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reply.error = reply.error or shorten(f"{type(error).__name__}: {error}")
        builder.build()
        if reply.error:
            reply.end = time.perf_counter()
        return reply

    async def _read(
        self, request: WorkloadRequest, response: aiohttp.ClientResponse, builder: ReplyBuilder
    ) -> None:
        """Reads a stream to its end, or until the request's cancellation."""
        reply, parser, unparsed = builder.reply, SSEParser(), b""
        chunks: AsyncIterator[bytes] = response.content.iter_any()
        if request.bytes_per_s is not None:
            chunks = _read_slowly(response.content, request.bytes_per_s)
        async for chunk in chunks:
            now = time.perf_counter()
            for data in parser.feed(chunk):
                builder.add(data, now)
                left = request.cancel_after is not None and (
                    reply.received_tokens >= request.cancel_after
                )
                if left and reply.ok:
                    reply.cancelled = True
                    response.close()  # closes the connection, as a client that leaves
                    return
            if builder.done:
                await _read_to_end(response.content)
                return
            if not builder.events:
                unparsed = (unparsed + chunk)[:_SHOWN_BYTES]
        if not builder.events:
            shown = _error_in(unparsed.decode(errors="replace")) or "nothing"
            reply.error = f"{response.content_type} without events: {shown}"

    async def fetch(self, url: str) -> str:
        """Returns the body of GET ``url``.

        Raises:
            ServerError: the server cannot be reached, or the status is not 200.
        """
        try:
            async with self._session.get(url, timeout=_FETCH_TIMEOUT) as response:
                if response.status != 200:
                    raise ServerError(f"GET {url}: {await _http_error(response)}")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerError(f"cannot reach {url}: {error}") from error

    def _payload(self, request: WorkloadRequest) -> bytes:
        options = {"include_usage": True}
        if request.cancel_after is not None:
            # A chunk may have several tokens. Without this option each counts as one.
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {"stream": True, "stream_options": options}
        if self.model is not None:
            body["model"] = self.model
        if self._chat:
            body["messages"] = _conversation(request.prompt)
            body["max_completion_tokens"] = request.output_len
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_len
        return msgspec.json.encode({**body, **self._body, **request.body})

    async def first_model(self) -> str:
        """Returns the id of the first model that the server lists.

        Raises:
            ServerError: the server cannot be reached, or lists no model.
        """
        url = f"{self.base_url}/v1/models"
        try:
            return str(msgspec.json.decode(await self.fetch(url))["data"][0]["id"])
        except (msgspec.DecodeError, RecursionError, LookupError, TypeError) as error:
            raise ServerError(f"GET {url} lists no model; name one with --model") from error

    async def server_version(self) -> str | None:
        """The version that the server tells at /version, as vLLM and Chairlift do."""
        try:
            version = msgspec.json.decode(await self.fetch(f"{self.base_url}/version"))["version"]
        except (ServerError, msgspec.DecodeError, RecursionError, KeyError, TypeError):
            return None
        return shorten(str(version))

    async def count_tokens(self, text: str) -> int | None:
        """Counts the tokens of a text with the server's tokenizer; None if it has no /tokenize.

        The field of the text is ``prompt`` for vLLM and Chairlift, ``content`` for llama.cpp.
        """
        for name in self._text_fields:
            tokens = await self._tokenize({name: text, "add_special_tokens": True})
            if tokens is not None:
                self._text_fields = (name,)
                return tokens
        return None

    async def count_prompt(self, request: WorkloadRequest) -> int | None:
        """Counts the tokens of the request's prompt, including those of the chat template.

        Returns None if the server has no /tokenize for such a prompt.
        """
        if not self._chat:
            return await self.count_tokens(request.prompt)
        messages = request.body.get("messages", _conversation(request.prompt))
        return await self._tokenize({"messages": messages})

    async def _tokenize(self, body: dict[str, Any]) -> int | None:
        data = msgspec.json.encode(body)
        try:
            async with self._session.post(
                f"{self.base_url}/tokenize", data=data, timeout=_FETCH_TIMEOUT
            ) as response:
                if response.status != 200:
                    return None
                # llama.cpp replies with no tokens if it does not know the field.
                return len((await response.json(content_type=None))["tokens"]) or None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None


def _conversation(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


async def _read_slowly(content: aiohttp.StreamReader, bytes_per_s: float) -> AsyncIterator[bytes]:
    while chunk := await content.read(max(1, round(bytes_per_s / _SLOW_READS))):
        yield chunk
        await asyncio.sleep(len(chunk) / bytes_per_s)


def _small_buffer_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER)
    return made


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Reads what follows the last event: only a response that is read to its end can leave its
    connection to the next request.
    """
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(_END_TIMEOUT):
            while await content.readany():
                pass


def _redirect_error(response: aiohttp.ClientResponse) -> str:
    """What became of a request that a status of 301, 302 or 303 has turned into a GET."""
    status = response.history[0].status if response.history else response.status
    return f"HTTP {status}: redirected to {shorten(str(response.url))}; send requests there"


async def _http_error(response: aiohttp.ClientResponse) -> str:
    text = _error_in(await response.text(errors="replace"))
    return f"HTTP {response.status} {shorten(response.reason or '')}: {text}"


def _error_in(text: str) -> str:
    """The message of an OpenAI-compatible error, or the text itself."""
    try:
        return error_text(msgspec.json.decode(text)["error"])
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return shorten(text)
