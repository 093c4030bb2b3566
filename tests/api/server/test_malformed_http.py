"""Input that is not HTTP, slow clients, and logs without users' text."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from support.api.api_server import Running, engine_replying, running
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import Submit


async def send_raw(server: Running, data: bytes, seconds: float = 5.0) -> bytes:
    """Sends bytes, and returns what the server answers until it closes the connection."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"s" * 10_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"s" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-A: secret\r\n" * 200 + b"\r\n", 431),
        (b"secret secret secret\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-A\x00: secret\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
    ],
    ids=["header", "path", "headers", "line", "zero", "tls"],
)
async def test_malformed_http_gets_an_error_and_is_not_logged(
    sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with running(engine_replying("Hello")) as server:
        reply = await send_raw(server, sent)
        assert reply.startswith(b"HTTP/1.0 %d " % status), reply
        assert b'{"error":{"message":' in reply
        assert b"secret" not in reply
        assert server.metric("chairlift_requests_rejected_total", reason="malformed") == 1
        assert await server.get("/health")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert "secret" not in caplog.text
    assert "ssss" not in caplog.text


TRANSFER_CODINGS = ["gzip, chunked", "deflate,chunked", "x, Chunked", "identity, gzip ,\tchunked"]


async def test_unknown_transfer_codings_are_not_implemented() -> None:
    """The connection goes on, because the last coding says where the body ends."""
    paths = ("/v1/completions", "/health", "/v1/messages", "/unknown")
    async with running(engine_replying("Hello")) as server:
        sent = b""
        for path, coding in zip(paths, TRANSFER_CODINGS, strict=True):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sent += f"{head}Transfer-Encoding: {coding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
        sent += b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        replies = (await send_raw(server, sent)).split(b"HTTP/1.1 ")[1:]
        assert [reply[:3] for reply in replies] == [b"501"] * len(TRANSFER_CODINGS) + [b"200"]
        assert all(b"no Transfer-Encoding but chunked" in reply for reply in replies[:-1])
        rejected = server.metric("chairlift_requests_rejected_total", reason="malformed")
        assert rejected == len(TRANSFER_CODINGS)
        # Where the body would end is unknown.
        refused = sent.replace(b", chunked", b"").partition(b"GET /health")[0]
        assert (await send_raw(server, refused)).startswith(b"HTTP/1.0 400 ")


async def test_the_known_transfer_coding() -> None:
    async with running(engine_replying("Hello")) as server:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        body = '1\r\n{\r\nE;name=value\r\n"prompt": "x"}\r\n0\r\nX-Trailer: x\r\n\r\n'
        for coding in ("chunked", "Chunked", " chunked "):
            end = f"Connection: close\r\nTransfer-Encoding:{coding}\r\n\r\n"
            reply = await send_raw(server, (head + end + body).encode())
            assert reply.startswith(b"HTTP/1.1 200 "), reply


async def test_streams_of_http_1_0_end_with_their_connection() -> None:
    """Also for a client that would keep it: nothing else can tell it where the stream ends."""
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    async with running(engine_replying("Hello")) as server:
        for connection in (b"", b"Connection: keep-alive\r\n", b"Connection: close\r\n"):
            sent = head + connection + b"Content-Length: %d\r\n\r\n" % len(body) + body
            reply = await send_raw(server, sent)
            assert reply.startswith(b"HTTP/1.0 200 ")
            assert reply.endswith(b"data: [DONE]\n\n")


async def test_slow_heads_and_slow_bodies_time_out() -> None:
    async with running(engine_replying("Hello"), idle_seconds=0.3, body_seconds=0.3) as server:
        assert await send_raw(server, b"GET /health HTTP/1.1\r\nHos") == b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        reply = await send_raw(
            server, head + b"Connection: close\r\nContent-Length: 50\r\n\r\n{", 20.0
        )
        assert reply.startswith(b"HTTP/1.1 408 ")


HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: {}\r\nTransfer-Encoding: chunked\r\n{}\r\n"
MALFORMED_ENDS = {
    "size": b"zz\r\n",
    "long size": b"1" * 20_000,
    "end of a chunk": b"1\r\n xx",
    "trailer": b"0\r\nno colon\r\n\r\n",
    "trailers": b"0\r\n" + b"X: y\r\n" * 1_000 + b"\r\n",
    "long trailer": b"0\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("end", MALFORMED_ENDS.values(), ids=MALFORMED_ENDS)
@pytest.mark.parametrize(
    ("path", "kind", "extra", "begin"),
    [
        ("/v1/completions", "application/json", "", b'{"prompt": "x"}'),
        ("/v1/messages", "application/json", "Content-Encoding: gzip\r\n", gzip.compress(b"{}")),
        (
            "/v1/files",
            "multipart/form-data; boundary=B",
            "",
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}',
        ),
    ],
    ids=["JSON", "gzip", "upload"],
)
async def test_malformed_chunks_are_refused_when_they_arrive(
    path: str, kind: str, extra: str, begin: bytes, end: bytes
) -> None:
    """Also after the head and valid chunks were read, and whether or not a handler waits."""
    async with running(engine_replying("Hello")) as server:
        for number, valid in enumerate((b"", b"%x\r\n%b\r\n" % (len(begin), begin)), 1):
            port = int(server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for part in (HEAD.format(path, kind, extra).encode(), valid, end):
                writer.write(part)
                await asyncio.sleep(0.05)
            reply = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert reply.startswith(b"HTTP/1.1 400 "), reply
            assert reply.count(b"HTTP/1.") == 1
            rejected = server.metric("chairlift_requests_rejected_total", reason="malformed")
            assert rejected == number
        assert not server.engine.submitted
        assert await server.get("/health")


async def test_malformed_data_behind_a_body_does_not_end_its_stream() -> None:
    async with running(engine_replying("Hello" * 20, step_seconds=0.01)) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "x", "stream": true}'
        head = HEAD.format("/v1/completions", "application/json", "").encode()
        writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        reply = await asyncio.wait_for(reader.readuntil(b'"text":'), 5)
        writer.write(b"\x00 no HTTP\r\n\r\n")
        reply += await asyncio.wait_for(reader.read(), 5)
        writer.close()
        first, _, second = reply.partition(b"data: [DONE]")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.0 400 " in second


def test_a_redacted_traceback_has_the_place_and_not_the_text() -> None:
    try:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise ValueError("secret") from error
    except ValueError as error:
        trace = redacted_traceback(error)
    assert "ValueError" in trace
    assert "caused by KeyError" in trace
    assert "test_malformed_http.py" in trace
    assert "secret" not in trace


async def test_no_users_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")

    def script(request: Submit, index: int) -> Scripted:
        raise ValueError(f"cannot generate for {request.prompt} and {'my secret'}")

    async with running(FakeEngine(model_info(), script)) as server:
        text = {"messages": [{"role": "user", "content": "my secret"}]}
        status, body = await server.post("/v1/chat/completions", text)
        assert (status, body["error"]["message"]) == (500, "internal error")
        wrong = {**text, "temperature": "my secret", "my secret": 1, "stop": ["my secret"]}
        for path in ("/v1/chat/completions", "/v1/completions?my+secret", "/my-secret"):
            status, _ = await server.post(path, wrong)
            assert status in (400, 404)
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
