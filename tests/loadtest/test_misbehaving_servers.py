"""``chairlift bench`` against servers that break rules, and runs that are interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import SMALL, FakeServer, bench, serving

from chairlift.loadtest import cli
from chairlift.loadtest.bench.client import OpenAIClient
from chairlift.loadtest.bench.metrics import Reply
from chairlift.loadtest.bench.server_metrics import parse_scrape
from chairlift.loadtest.data.workload import WorkloadRequest
from chairlift.loadtest.errors import ServerError

_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _token(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def _usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}}


def _chunks(*events: dict[str, Any] | str) -> bytes:
    """Events as chunks of an HTTP response, without its end."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    data = [f"data: {line}\n\n".encode() for line in lines]
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in data)


def _plain(status: str, content_type: str, body: bytes, more: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + more + b"\r\n" + body


_Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool]]


@asynccontextmanager
async def _client_of(answer: _Answer) -> AsyncIterator[OpenAIClient]:
    """A client of a server that calls ``answer`` with each request's head, while that is True."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            more = True
            while more:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = re.findall(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                more = await answer(head, writer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with OpenAIClient(f"http://127.0.0.1:{port}") as client:
        yield client
    server.close()
    await asyncio.sleep(0.02)  # the handlers see that their clients have left


async def _reply(response: bytes, stays: bool = False) -> Reply:
    """The reply from these bytes, after which the server keeps its connection or closes it."""

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> bool:
        moved = head.startswith(b"GET /moved")
        writer.write(_plain("200 OK", "text/html", b"<html>") if moved else response)
        return stays or b"Location" in response

    async with _client_of(answer) as client:
        return await client.complete(WorkloadRequest("a b", 2, 9))


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (
            _plain("200 OK", "application/json", b'{"choices": [\n{"text": "hello"}]}'),
            'application/json without events: {"choices": [ {"text": "hello"}]}',
        ),
        (
            _plain("200 OK", "application/json", b'{"error": {"message": "no such model"}}'),
            "application/json without events: no such model",
        ),
        (_plain("200 OK", "text/html", b""), "text/html without events: nothing"),
        (
            _plain("502 Bad Gateway", "text/html", b"<html>\r\n\r\n<b>\x1b[31mno</b>\n</html>"),
            "HTTP 502 Bad Gateway: <html> <b>?[31mno</b> </html>",
        ),
        (
            _plain("301 Moved", "text/html", b"", b"Location: /moved\r\n"),
            "HTTP 301: redirected to http://127.0.0.1:",
        ),
        (_CHUNKED + _chunks(_token("a"), _token("b")), "ClientPayloadError"),
        # An empty reason, as some servers send with each chunk, does not end the reply.
        (_CHUNKED + _chunks(_token("a", "")) + b"0\r\n\r\n", "the stream ended before the reply"),
        (_CHUNKED + _chunks("{nope"), "malformed event: "),
    ],
)
async def test_an_error_says_in_one_line_what_came(response: bytes, error: str) -> None:
    reply = await _reply(response)
    assert reply.error.startswith(error)
    assert reply.error.isprintable()
    assert (reply.ok, reply.output_tokens) == (False, 0)


async def test_a_failed_reply_ends_when_it_fails() -> None:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.2)
        writer.write(_plain("500 Error", "text/plain", b"late"))
        return False

    async with _client_of(answer) as client:
        reply = await client.complete(WorkloadRequest("a", 1, 2))
    assert reply.error == "HTTP 500 Error: late"
    assert 0.2 <= reply.latency < 5


@pytest.mark.parametrize("stays", [False, True])
async def test_a_reply_is_complete_at_its_last_event(stays: bool) -> None:
    # The response itself does not end: the server closes the connection, or keeps it open.
    events = _chunks(_token(" a"), _token(" b", "length"), _usage(2), "[DONE]")
    start = time.perf_counter()
    reply = await _reply(_CHUNKED + events, stays)
    assert (reply.error, reply.text, reply.output_tokens) == ("", " a b", 2)
    assert reply.latency < time.perf_counter() - start < 5


async def test_connections_are_used_again() -> None:
    ports = set()

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> bool:
        ports.add(writer.get_extra_info("peername")[1])
        writer.write(_CHUNKED + _chunks(_token(" a", "stop"), "[DONE]"))
        await writer.drain()
        await asyncio.sleep(0.02)  # the response's end comes in a packet of its own
        writer.write(b"0\r\n\r\n")
        return True

    async with _client_of(answer) as client:
        replies = [await client.complete(WorkloadRequest("a", 1, 2)) for _ in range(3)]
    assert all(reply.ok for reply in replies)
    assert len(ports) == 1


@pytest.mark.parametrize("text", ["<html>\n<body>", 'a{x="1", ="b"} 3', "a{", "\x00"])
def test_metrics_in_no_known_format_are_one_error(text: str) -> None:
    with pytest.raises(ServerError, match="not in Prometheus' format"):
        parse_scrape(text)


def _interrupting(
    fake: FakeServer, after: int, number: signal.Signals = signal.SIGINT
) -> threading.Thread:
    """Presses Ctrl-C, or sends another signal, once the server has got that many requests."""

    def press() -> None:
        limit = time.monotonic() + 20
        while len(fake.bodies) < after and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (("--num-prompts", "500", "--max-concurrency", "2"), signal.SIGINT),
        (("--num-prompts", "500", "--max-concurrency", "2"), signal.SIGTERM),
        (("--num-prompts", "500", "--request-rate", "50"), signal.SIGINT),
        (("--duration", "60", "--max-concurrency", "2"), signal.SIGTERM),
    ],
)
def test_an_interrupted_run_shows_and_saves_what_it_measured(
    flags: tuple[str, ...],
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    files = ("--save-result", "--result-filename", str(saved), "--html", str(page))
    with serving(FakeServer(token_seconds=0.005)) as fake:
        thread = _interrupting(fake, 12, number)
        assert bench(fake, *SMALL, *flags, *files) == cli.EXIT_INTERRUPTED
        thread.join()
    result = json.loads(saved.read_text())
    printed = capsys.readouterr()
    assert result["interrupted"] is True
    assert 0 < result["completed"] == result["num_prompts"] < 50
    assert result["total_output_tokens"] == 5 * result["completed"]
    assert f"Successful requests:                     {result['completed']}" in printed.out
    assert f"of the {result['completed']} requests that had ended" in printed.out
    assert printed.err.endswith("chairlift bench: interrupted\n")
    assert "</html>" in page.read_text()


def test_an_interrupted_check_keeps_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "r.json"
    flags = ("--verify", "--num-prompts", "30", "--save-result", "--result-filename", str(saved))
    with serving(FakeServer(token_seconds=0.005)) as fake:
        thread = _interrupting(fake, after=33)
        assert bench(fake, *SMALL, *flags) == cli.EXIT_INTERRUPTED
        thread.join()
    result = json.loads(saved.read_text())
    assert (result["completed"], result["interrupted"]) == (30, True)
    assert "verify_compared" not in result


def test_an_interruption_before_any_reply_keeps_older_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    page.write_text("older")
    with serving(FakeServer(token_seconds=5)) as fake:
        thread = _interrupting(fake, after=6)
        assert bench(fake, *SMALL, "--html", str(page)) == cli.EXIT_INTERRUPTED
        thread.join()
    assert "Interrupted before any request had ended." in capsys.readouterr().out
    assert page.read_text() == "older"


def test_a_server_without_tokenize_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    async def refuse(client: OpenAIClient, body: dict[str, Any]) -> None:
        asked.append(body)

    with serving(FakeServer()) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenAIClient, "_tokenize", refuse)
        assert bench(fake, *SMALL) == cli.EXIT_OK
    assert len(asked) == 2  # vLLM's field and llama.cpp's
    assert "has no /tokenize" in capsys.readouterr().out


async def test_tokenize_is_asked_with_the_field_that_the_server_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def answer(client: OpenAIClient, body: dict[str, Any]) -> int | None:
        asked.append(next(iter(body)))
        return 3 if "content" in body else None

    monkeypatch.setattr(OpenAIClient, "_tokenize", answer)
    async with OpenAIClient("http://127.0.0.1:1") as client:
        assert [await client.count_tokens("a b c") for _ in range(3)] == [3, 3, 3]
    assert asked == ["prompt", "content", "content", "content"]


@pytest.mark.parametrize("hard", [90, 600])
def test_a_limit_of_open_files_is_raised_or_costs_requests_but_no_results(hard: int) -> None:
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (90, {hard}))\n"
        "from chairlift.loadtest import cli\n"
        "sys.exit(cli.main())\n"
    )
    flags = ("--num-prompts", "200", "--random-input-len", "4", "--random-output-len", "5")
    with serving(FakeServer(token_seconds=0.2)) as fake:
        command = [sys.executable, "-c", program, "--base-url", fake.base_url, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    completed = int(re.findall(r"Successful requests: +(\d+)", done.stdout)[0])
    if hard == 600:
        assert (done.returncode, completed) == (cli.EXIT_OK, 200), done.stderr
    else:
        assert done.returncode == cli.EXIT_FAILED
        assert 20 < completed < 90
        assert "Too many open files" in done.stdout
