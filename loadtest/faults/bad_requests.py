"""Generates invalid HTTP requests from a seed, as bytes, beyond what a schema can describe."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["patient", "half-closed", "left"]

# Values as JSON text, some of it malformed.
_DEEP = 5_000
_VALUES: tuple[bytes, ...] = (
    *(b"null", b"true", b"false", b"0", b"-0", b"-1", b"1.5", b"1e308", b"-1e308", b"1e-400"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"0x10", b"01", b"1_000", b"+1"),
    *(b"2147483648", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809"),
    *(b"9" * 400, b"0." + b"0" * 400 + b"1", b"1" * 5_000),
    *(b'""', b'"\\u0000"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xc0\x80"'),
    *(b'"\xed\xa0\x80"', b'"\\x"', b'"' + b"x" * 100_000 + b'"', "\u202e\u0000".encode()),
    *(b'"\\u202e"', b"[]", b"{}", b"[null]", b"[[]]", b'[""]', b"[1,[2]]", b'{"":{"":[]}}'),
    *(b"[" * _DEEP, b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP),
    *(b"[" + b"0," * 20_000 + b"0]", b"[" + b'"a",' * 5_000 + b'"a"]'),
    *(b'{"type":"text"}', b'[{"type":"text","text":5}]', b'[{"type":"image_url","image_url":{}}]'),
    *(b'[{"role":"user"}]', b'[{"role":null,"content":null}]', b'[{"role":"user","content":[[]]}]'),
    *(b"undefined", b"'x'", b"", b"/* x */ 1", b"\x00", b"\xef\xbb\xbf1"),
)
_BASES: dict[str, dict[str, bytes]] = {
    "/v1/chat/completions": {
        "messages": b'[{"role":"user","content":"hi"}]',
        "max_tokens": b"2",
    },
    "/v1/completions": {"prompt": b'"hi"', "max_tokens": b"2"},
    "/v1/responses": {"input": b'"hi"', "max_output_tokens": b"2"},
    "/v1/messages": {
        "messages": b'[{"role":"user","content":"hi"}]',
        "max_tokens": b"2",
    },
    "/tokenize": {"prompt": b'"hi"'},
    "/detokenize": {"tokens": b"[1,2]"},
}
_ENDINGS: tuple[Ending, ...] = ("patient", "half-closed", "left")
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "BREW", "post", "P\x00ST")
_TYPES = ("", "text/plain", "multipart/form-data; boundary=x", "application/xml", "a/b/c", "\xff")
_PATHS = (
    *("/", "//", "/v1", "/v1/models/" + "a/" * 500, "/v1/models/%00", "/v1/models/%ff%fe", "/%"),
    *("/../../etc/passwd", "/v1/completions?x=" + "y" * 5_000, "*", "http://[::1", "/\x7f"),
)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request.

    Attributes:
        kind: what is wrong with it.
        data: its bytes.
        ending: what the client does after sending them. "patient": it waits for a reply and closes
            its half of the connection if none comes soon; "half-closed": it closes its half at
            once; "left": it disconnects.
    """

    kind: str
    data: bytes
    ending: Ending = "patient"


def bad_requests(schema: dict[str, Any], seed: int) -> Iterator[BadRequest]:
    """Yields bad requests endlessly; takes the names of fields from ``schema``, /openapi.json."""
    draw = random.Random(seed)
    components = schema["components"]["schemas"].values()
    fields = sorted({name for part in components for name in part.get("properties", ())})
    while True:
        yield draw.choice(_KINDS)(draw, fields)


def _wrong_values(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    return BadRequest("wrong values", _post(path, body))


def _broken_json(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    bytes_ = bytearray(body)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(bytes_))
        match draw.randrange(4):
            case 0:
                bytes_[at] = draw.randrange(256)
            case 1:
                del bytes_[at : at + draw.randint(1, 8)]
            case 2:
                bytes_[at:at] = draw.randbytes(draw.randint(1, 8))
            case _:
                del bytes_[max(1, at) :]
        bytes_ = bytes_ or bytearray(b"{")
    return BadRequest("broken JSON", _post(path, bytes(bytes_)))


def _no_json(draw: random.Random, fields: list[str]) -> BadRequest:
    body = draw.choice((*_VALUES, draw.randbytes(draw.randint(0, 200))))
    return BadRequest("no JSON object", _post(draw.choice(list(_BASES)), body))


def _wrong_type(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    kind = draw.choice(_TYPES).encode("latin-1")
    return BadRequest("wrong content type", _post(path, body, kind=kind))


def _wrong_coding(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    coding = draw.choice((b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"x"))
    data = draw.choice((body, zlib.compress(body)[:-3], _bomb()))
    head = b"Content-Encoding: " + coding + b"\r\n"
    return BadRequest("wrong content coding", _post(path, data, head))


def _wrong_method(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    method = draw.choice(_METHODS).encode()
    return BadRequest("wrong method", _post(path, body).replace(b"POST", method, 1))


def _wrong_path(draw: random.Random, fields: list[str]) -> BadRequest:
    path = draw.choice(_PATHS)
    return BadRequest("wrong path", _post(path, b"{}"))


def _wrong_head(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    head = draw.choice(
        (
            b"X-Big: " + b"x" * draw.choice((8_000, 9_000, 100_000)) + b"\r\n",
            b"".join(b"X-%d: y\r\n" % i for i in range(draw.choice((100, 200, 5_000)))),
            b"X-Priority: " + draw.choice((b"9" * 50, b"x", b"1.5", b"\xff", b"101")) + b"\r\n",
            b"Authorization: " + draw.choice((b"Bearer", b"Bearer \xff", b"Basic eA==")) + b"\r\n",
            b"X-Request-Id: "
            + draw.randbytes(20).replace(b"\r", b"").replace(b"\n", b"")
            + b"\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: x\r\n",
            b"Content-Length: 5\r\n",
            b"Content-Length: -1\r\n",
            b"Content-Length: 99999999999999999999\r\n",
            b"Expect: 100-continue\r\n",
            b"Expect: tea\r\n",
            b"Upgrade: websocket\r\nConnection: upgrade\r\n",
            b"Host: a\r\nHost: b\r\n",
            b"No colon here\r\n",
            b" folded: x\r\n",
            b"X-Zero: \x00\r\n",
            b"Origin: \xff\r\n",
        )
    )
    return BadRequest("wrong head", _post(path, body, head))


def _wrong_line(draw: random.Random, fields: list[str]) -> BadRequest:
    line = draw.choice(
        (
            draw.randbytes(draw.randint(1, 300)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(64),
            b"GET / HTTP/9.9",
            b"GET /",
            b"GET / HTTP/1.1 x",
            b"PRI * HTTP/2.0",
            b"\r\n" * 50,
        )
    )
    return BadRequest("no HTTP", line + b"\r\n\r\n")


def _cut_off(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    data = _post(path, body)
    ending = draw.choice(_ENDINGS)
    return BadRequest("cut off", data[: draw.randrange(1, len(data))], ending)


def _chunked(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    sizes = (b"%x" % len(body), b"zz", b"-1", b"f" * 20, b"%x;x=%s" % (len(body), b"y" * 9_000))
    chunk = draw.choice(sizes) + b"\r\n" + body + draw.choice((b"\r\n", b"", b"xx"))
    end = draw.choice((b"0\r\n\r\n", b"0\r\n", b"", b"0\r\nX: y\r\n\r\n"))
    head = b"Transfer-Encoding: chunked\r\n"
    data = _head(path, head) + chunk + end
    return BadRequest("chunks", data, draw.choice(_ENDINGS))


def _pipelined(draw: random.Random, fields: list[str]) -> BadRequest:
    path, body = _body(draw, fields)
    one = _post(path, body).replace(b"Connection: close\r\n", b"")
    return BadRequest("pipelined", one * draw.randint(2, 50), draw.choice(_ENDINGS))


def _abandoned_stream(draw: random.Random, fields: list[str]) -> BadRequest:
    body = b'{"prompt":"hi","stream":true,"ignore_eos":true}'
    return BadRequest("left stream", _post("/v1/completions", body), "left")


_KINDS: tuple[Callable[[random.Random, list[str]], BadRequest], ...] = (
    *(_wrong_values,) * 6,
    *(_broken_json,) * 3,
    *(_no_json, _wrong_type, _wrong_coding, _wrong_method, _wrong_path, _wrong_head, _wrong_line),
    *(_cut_off, _chunked, _pipelined, _abandoned_stream),
)


@functools.cache
def _bomb() -> bytes:
    return zlib.compress(b" " * 50_000_000)


def _body(draw: random.Random, fields: list[str]) -> tuple[str, bytes]:
    """A path, and a body for it with one to three values that are probably invalid."""
    path = draw.choice(list(_BASES))
    members = dict(_BASES[path])
    for _ in range(draw.randint(1, 3)):
        members[draw.choice((*fields, *members))] = draw.choice(_VALUES)
    pairs = [b'"%b":%b' % (name.encode(), value) for name, value in members.items()]
    pairs += draw.choices(pairs, k=draw.choice((0, 0, 1)))
    return path, b"{" + b",".join(pairs) + b"}"


def _post(path: str, body: bytes, head: bytes = b"", kind: bytes = b"application/json") -> bytes:
    return _head(path, b"Content-Length: %d\r\n" % len(body) + head, kind) + body


def _head(path: str, head: bytes, kind: bytes = b"application/json") -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: %b\r\n%b\r\n"
        % (path.encode("latin-1"), kind, head)
    )
