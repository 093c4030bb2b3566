"""The ingress with replicas that answer, refuse and disappear."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.keys import NO_LIMITS, given_keys
from chairlift.api.cluster import ingress as ingress_module
from chairlift.api.cluster.forwarding import (
    ForwardedRequest,
    ReplicaLost,
    ReplyHead,
    end_to_end,
)
from chairlift.api.cluster.ingress import Ingress
from chairlift.engine.errors import QueueFull

EVENTS = ReplyHead(200, [("Content-Type", "text/event-stream; charset=utf-8")])
LINES = ReplyHead(200, [("Content-Type", "application/x-ndjson")])
JSON = ReplyHead(200, [("Content-Type", "application/json")])
LOST = ReplicaLost("gone")
CHAT = "/v1/chat/completions"
HI = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}

# What one attempt yields: pieces, and an error that ends them.
Attempt = Sequence[ReplyHead | bytes | Exception]


class Replicas:
    """Plays one attempt after another, the last one again and again."""

    def __init__(self, *attempts: Attempt) -> None:
        self.attempts = list(attempts)
        self.requests: list[ForwardedRequest] = []
        self.closed = 0

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        self.requests.append(request)
        attempt = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        try:
            for piece in attempt:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.closed += 1


class Client:
    """Calls the application as Ray's proxy does."""

    def __init__(self, *keys: str, max_body_bytes: int = 1000, **models: Replicas) -> None:
        accounts = Accounts(given_keys(keys, NO_LIMITS), NO_LIMITS)
        self.app = Ingress(models, accounts, max_body_bytes)
        self.sent: list[dict[str, Any]] = []

    async def __call__(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, str]:
        data = b"" if body is None else json.dumps(body).encode()
        return await self.send(method, path, data, **headers)

    async def send(self, method: str, path: str, data: bytes, **headers: str) -> tuple[int, str]:
        pieces = [data[start : start + 7] for start in range(0, len(data), 7)] or [b""]
        messages = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        path, _, query = path.partition("?")
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
            ],
        }
        self.sent = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        return self.sent[0]["status"], text

    def header(self, name: bytes) -> bytes | None:
        return dict(self.sent[0]["headers"]).get(name)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_RETRY_SECONDS", 0.0)


async def test_request_and_reply_pass_through() -> None:
    head = ReplyHead(201, [("Content-Type", "application/json"), ("X-Limit", "7")])
    replicas = Replicas([head, b'{"a":', b"1}"])
    client = Client(a=replicas)
    assert await client("POST", CHAT + "?x=%20y", HI, x_request_id="id-1") == (201, '{"a":1}')
    assert client.header(b"X-Limit") == b"7"
    assert client.header(b"Content-Length") == b"7"
    [request] = replicas.requests
    assert (request.method, request.path) == ("POST", CHAT + "?x=%20y")
    assert json.loads(request.body) == HI
    assert ("X-Request-Id", "id-1") in request.headers
    assert "Hi" in request.prompt


async def test_a_compressed_body_is_routed_and_passed_on_decoded() -> None:
    first, second = Replicas([JSON, b"1"]), Replicas([JSON, b"2"])
    client = Client(a=first, b=second)
    body = json.dumps({**HI, "model": "b"}).encode()
    zipped = gzip.compress(body)
    assert await client.send("POST", CHAT, zipped, content_encoding="gzip") == (200, "2")
    [request] = second.requests
    assert request.body == body
    assert "content-encoding" not in dict(request.headers)
    for encoding in ("br", "foo", "gzip, gzip"):
        status, text = await client.send("POST", CHAT, zipped, content_encoding=encoding)
        assert (status, json.loads(text)["error"]["code"]) == (415, "unsupported_encoding")
        assert client.header(b"Accept-Encoding") == b"gzip, deflate, identity"
    status, _ = await client.send("POST", CHAT, zipped[:-2], content_encoding="gzip")
    assert status == 400
    bomb = gzip.compress(b" " * 1001)
    status, _ = await client.send("POST", CHAT, bomb, content_encoding="gzip")
    assert status == 413
    assert not first.requests


async def test_stream_is_passed_on_piece_by_piece() -> None:
    client = Client(a=Replicas([EVENTS, b"data: 1\n\n", b"data: 2\n\n"]))
    assert await client("POST", CHAT, HI) == (200, "data: 1\n\ndata: 2\n\n")
    bodies = [message["body"] for message in client.sent[1:]]
    assert bodies == [b"data: 1\n\n", b"data: 2\n\n", b""]


@pytest.mark.parametrize(
    "lost",
    [[LOST], [EVENTS, LOST], [JSON, LOST], [JSON, b'{"a":', LOST], [ReplyHead(503, []), b"{}"]],
    ids=["at once", "before an event", "before the body", "in the body", "draining"],
)
async def test_lost_before_the_reply_is_tried_again(lost: Attempt) -> None:
    replicas = Replicas(lost, lost, [EVENTS, b"data: 1\n\n"])
    assert await Client(a=replicas)("POST", CHAT, HI) == (200, "data: 1\n\n")
    assert replicas.closed == 3


async def test_no_replica_at_all() -> None:
    client = Client(a=Replicas([LOST]))
    status, text = await client("POST", CHAT, HI)
    assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")
    assert client.header(b"Retry-After") == b"5"


async def test_replicas_that_stay_unavailable_say_why() -> None:
    reason = [ReplyHead(503, [("Content-Type", "application/json")]), b'{"error":"why"}']
    assert await Client(a=Replicas(reason))("POST", CHAT, HI) == (503, '{"error":"why"}')


@pytest.mark.parametrize(
    ("path", "head", "before", "after"),
    [
        (CHAT, EVENTS, b"data: 1\n\n", 'data: {"error":{"message":'),
        (CHAT, EVENTS, b"data: 1", '\n\ndata: {"error":{"message":'),
        ("/v1/messages", EVENTS, b"event: a\ndata: 1\n\n", 'event: error\ndata: {"type":"error"'),
        ("/v1/responses", EVENTS, b"event: a\ndata: 1\n\n", 'event: error\ndata: {"type":"error"'),
        ("/api/chat", LINES, b'{"a":1}\n', '{"error":'),
        ("/api/chat", LINES, b'{"a":1', '\n{"error":'),
    ],
)
async def test_lost_in_a_stream_ends_it_with_an_error(
    path: str, head: ReplyHead, before: bytes, after: str
) -> None:
    status, text = await Client(a=Replicas([head, before, LOST]))("POST", path, HI)
    assert status == 200
    assert text.startswith(before.decode() + after)
    assert "the replica was lost during the reply" in text
    assert text.endswith("\n")


async def test_sequence_number_of_a_lost_response() -> None:
    pieces = [b"event: a\nda", b"ta: 1\n", b"\nevent: b\ndata: 2\n\n"]
    replicas = Replicas([EVENTS, *pieces, LOST])
    _, text = await Client(a=replicas)("POST", "/v1/responses", HI)
    event = json.loads(text.rpartition("data: ")[2])
    assert event["sequence_number"] == 2


@pytest.mark.parametrize(
    ("name", "found"),
    [("a", "a"), ("b", "b"), ("b:latest", "b"), ("b:adapter", "b"), (None, "a"), (7, "a")],
)
async def test_requests_go_to_the_model_that_they_name(name: object, found: str) -> None:
    models = {each: Replicas([JSON, each.encode()]) for each in "ab"}
    assert await Client(**models)("POST", CHAT, {"model": name}) == (200, found)


async def test_model_card_is_asked_of_its_model() -> None:
    models = {each: Replicas([JSON, each.encode()]) for each in "ab"}
    assert await Client(**models)("GET", "/v1/models/b") == (200, "b")


@pytest.mark.parametrize(
    ("path", "start"),
    [
        (CHAT, '{"error":{"message":"the model \'c\' does not exist"'),
        ("/v1/messages", '{"type":"error","error":{"type":"not_found_error"'),
        ("/api/chat", '{"error":"model not found'),
    ],
)
async def test_unknown_model_in_each_format(path: str, start: str) -> None:
    status, text = await Client(a=Replicas([JSON]))("POST", path, {"model": "c"})
    assert status == 404
    assert text.startswith(start)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_1", None),
        ("DELETE", "/v1/responses/resp_1", None),
        ("GET", "/v1/responses/resp_1/input_items", None),
        ("POST", "/v1/files", {}),
        ("GET", "/v1/batches/b/cancel", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("POST", "/v1/models/a/load", {}),
        ("POST", "/v1/models/org/a/unload", {}),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": "r"}),
        ("POST", "/v1/responses", {"input": "a", "background": True}),
    ],
)
async def test_what_needs_state_is_refused(method: str, path: str, body: object) -> None:
    replicas = Replicas([JSON, b"{}"])
    status, text = await Client(a=replicas)(method, path, body)
    assert status == 400
    assert "a cluster keeps no responses" in text
    assert replicas.requests == []


async def test_routes_beside_stored_responses_pass() -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        assert (await Client(a=Replicas([JSON, b"{}"]))("POST", path, {"input": "a"}))[0] == 200


async def test_keys() -> None:
    replicas = Replicas([JSON, b"{}"])
    client = Client("secret-key", a=replicas)
    status, text = await client("POST", CHAT, HI)
    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    assert (await client("POST", CHAT, HI, authorization="Bearer wrong-key"))[0] == 401
    assert replicas.requests == []
    assert (await client("POST", CHAT, HI, authorization="Bearer secret-key"))[0] == 200
    assert ("authorization", "Bearer secret-key") in replicas.requests[0].headers
    assert (await client("POST", CHAT, HI, x_api_key="secret-key"))[0] == 200
    assert (await client("GET", "/health"))[0] == 200


async def test_body_that_is_too_large() -> None:
    replicas = Replicas([JSON, b"{}"])
    client = Client(a=replicas, max_body_bytes=10)
    status, text = await client("POST", CHAT, HI)
    assert (status, json.loads(text)["error"]["code"]) == (413, "body_too_large")
    assert replicas.requests == []


async def test_full_queue() -> None:
    client = Client(a=Replicas([QueueFull("full", 3.2)]))
    assert (await client("POST", CHAT, HI))[0] == 429
    assert client.header(b"Retry-After") == b"4"


async def test_bug_in_a_replica_is_a_500_and_not_tried_again() -> None:
    replicas = Replicas([ValueError("a bug")])
    status, text = await Client(a=replicas)("POST", CHAT, HI)
    assert (status, "bug" in text, len(replicas.requests)) == (500, False, 1)


async def test_anthropics_lists_are_joined_with_the_ends_of_the_whole() -> None:
    page = '{"data":[{"id":"%s"}],"has_more":false,"first_id":"%s","last_id":"%s"}'
    replicas = {each: Replicas([JSON, page.replace("%s", each).encode()]) for each in "ab"}
    client = Client(**replicas)
    _, text = await client("GET", "/v1/models", anthropic_version="2023-06-01")
    whole = json.loads(text)
    assert [card["id"] for card in whole["data"]] == ["a", "b"]
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == ("a", "b", False)
    status, text = await client("GET", "/v1/models/c", anthropic_version="2023-06-01")
    assert (status, json.loads(text)["error"]["type"]) == (404, "not_found_error")


async def test_lists_are_joined_and_health_is_that_of_all() -> None:
    one = Replicas([JSON, b'{"data":[{"id":"a"}],"object":"list"}'])
    two = Replicas([JSON, b'{"data":[{"id":"b"}],"object":"list"}'])
    client = Client(a=one, b=two)
    status, text = await client("GET", "/v1/models")
    assert (status, [card["id"] for card in json.loads(text)["data"]]) == (200, ["a", "b"])
    assert await client("GET", "/health") == (200, '{"status":"ok"}')
    two.attempts = [[LOST]]
    status, text = await client("GET", "/v1/models")
    assert (status, [card["id"] for card in json.loads(text)["data"]]) == (200, ["a"])
    status, text = await client("GET", "/health")
    assert (status, json.loads(text)["reason"]) == (503, "no replica can serve b")


def test_headers_of_one_connection_stay_behind() -> None:
    given = [
        *(("Host", "h"), ("Connection", "close, X-Mine"), ("X-Mine", "1"), ("X-Other", "2")),
        *(("Transfer-Encoding", "chunked"), ("Authorization", "Bearer k")),
    ]
    assert end_to_end(given) == [("X-Other", "2"), ("Authorization", "Bearer k")]


async def test_lifespan() -> None:
    sent: list[Any] = []
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, str]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await Ingress({}, Accounts((), NO_LIMITS), 1)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
