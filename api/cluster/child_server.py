"""A complete ``chairlift serve`` as a child process that requests are passed to."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from chairlift.api.cluster.forwarding import ForwardedRequest, ReplicaLost, ReplyHead, end_to_end
from chairlift.engine.device.ports import LOOPBACK, ReservedPorts

_MODULE = "chairlift.api.cli.serve_child"
_POLL_SECONDS = 0.2
# A working server answers /health and /metrics within this time, even on a busy machine.
_ANSWER_SECONDS = 20.0
_KEPT_LINES = 5
_LINE_BYTES = 1 << 16
# The gauges that autoscaling reads, and their names there.
GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}


class ChildServer:
    """Starts a server, passes requests to it and stops it.

    Args:
        arguments: the arguments of ``chairlift serve``, without an address.
        stop_seconds: the time that it gets to end by itself when it is stopped.
    """

    def __init__(self, arguments: Sequence[str], stop_seconds: float) -> None:
        self._arguments = list(arguments)
        self._stop_seconds = stop_seconds
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stopping = False

    async def start(self, seconds: float) -> None:
        """Starts the server and waits until it can serve.

        Raises:
            ReplicaLost: it ended, or was not ready in time; the message has its last lines.
        """
        self._port = ReservedPorts(1)
        (port,) = self._port.numbers
        self._url = f"http://{LOOPBACK}:{port}"
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS),
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, *self._arguments),
            *("--host", LOOPBACK, "--port", str(port)),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            # Ray's own signals to the worker's group are not for the server, which drains.
            start_new_session=True,
        )
        self._log = asyncio.create_task(self._pass_log_on())
        try:
            async with asyncio.timeout(seconds):
                while not await self.is_healthy():
                    if not self.is_alive:
                        raise ReplicaLost(await self.epitaph())
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await self.stop()
            raise ReplicaLost(f"the server was not ready after {seconds:g} s") from None
        except BaseException:
            await self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    async def ended(self) -> bool:
        """Waits for the end of the process; returns whether nobody stopped it."""
        await self._process.wait()
        return not self._stopping

    async def epitaph(self) -> str:
        """One line about the end of the process, with the last lines of its log."""
        code = await self._process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._log), _ANSWER_SECONDS)
        return f"the server ended with exit code {code}: {' | '.join(self._last_lines)}"

    async def is_healthy(self) -> bool:
        """Whether the server can serve; false as well if it does not answer."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                async with self._http.get(f"{self._url}/health") as reply:
                    return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def gauges(self) -> dict[str, float]:
        """The sums of ``GAUGES`` over all models of the server.

        Raises:
            aiohttp.ClientError, TimeoutError: the server does not answer.
        """
        async with asyncio.timeout(_ANSWER_SECONDS):
            async with self._http.get(
                f"{self._url}/metrics", headers={"Accept-Encoding": "identity"}
            ) as reply:
                text = await reply.text()
        found = dict.fromkeys(GAUGES.values(), 0.0)
        for family in text_string_to_metric_families(text):
            if family.name in GAUGES:
                found[GAUGES[family.name]] += sum(sample.value for sample in family.samples)
        return found

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Passes a request to the server, as ``Backend.forward``."""
        try:
            reply = await self._http.request(
                request.method,
                URL(self._url + request.path, encoded=True),
                headers=request.headers,
                data=request.body or None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(f"the replica's server does not answer: {error}") from error
        try:
            yield ReplyHead(reply.status, end_to_end(list(reply.headers.items())))
            async for chunk in reply.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost("the replica's server ended during the reply") from error
        finally:
            # Closes the connection if the reply is unfinished, which aborts the request.
            reply.close()

    async def stop(self) -> None:
        """Ends the server with SIGTERM, which lets it drain, and with SIGKILL if it hangs."""
        self._stopping = True
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), self._stop_seconds)
            except TimeoutError:
                # Its engine and workers, which have sessions of their own, end with it.
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await self._http.close()
        self._port.release()

    async def _pass_log_on(self) -> None:
        stream: Any = self._process.stderr
        while True:
            try:
                line: bytes = await stream.readline()
            except ValueError:  # a line above the limit, of which the reader drops a part
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines.append(text)
            print(text, file=sys.stderr, flush=True)
