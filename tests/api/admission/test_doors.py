"""Who is let in, and how much of it: keys, limits, TLS, web pages, headers, the metrics' port."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import trustme
from support.api.api_server import CHAT, Running, ending, running, until
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.api.admission.keys import (
    NO_LIMITS,
    ApiKey,
    KeyFileError,
    KeyLimits,
    digest_of,
    read_keys,
)
from chairlift.api.admission.ratelimit import Account, Bucket, duration
from chairlift.api.server.listen import is_loopback, listen, listen_for_scrapes
from chairlift.api.server.sockets import bind
from chairlift.api.server.tls import Certificate
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings
from chairlift.api.text import vocabulary
from chairlift.api.text.limited import TimeLimitedThreads, TookTooLong
from chairlift.engine.errors import RequestError
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import Submit

ALICE, BOB = "sk-alice-secret", "sk-bob-secret"
PROMPT = {"prompt": "x"}


def keys(alice: KeyLimits = NO_LIMITS, bob: KeyLimits = NO_LIMITS) -> tuple[ApiKey, ...]:
    return (
        ApiKey("alice", digest_of(ALICE), alice),
        ApiKey("bob", digest_of(BOB), bob),
    )


def engine(text: str = "Hello", **settings: Any) -> FakeEngine:
    return FakeEngine(model_info(), ending(text), **settings)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Keys


async def test_what_needs_a_key_and_what_does_not() -> None:
    async with running(engine(), keys=keys()) as server:
        for path in ("/health", "/ping", "/version", "/openapi.json", "/metrics"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200, path
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/org/tiny"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/embeddings"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/tokenizer_info"),
            ("GET", "/v1/completions"),
            ("GET", "/nothing"),
        ):
            async with server.http.request(method, server.url + path, json=CHAT) as response:
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert (error["code"], error["param"]) == ("invalid_api_key", None)
        rejected = server.metric("chairlift_requests_rejected_total", reason="unauthorized")
        assert rejected == 10
        assert not server.engine.submitted


async def test_keys_are_taken_as_openai_and_as_others_send_them() -> None:
    async with running(engine(), keys=keys()) as server:
        for headers in (bearer(ALICE), {"Authorization": f"bearer {BOB} "}, {"X-Api-Key": BOB}):
            status, _ = await server.post("/v1/completions", PROMPT, **headers)
            assert status == 200
        for headers in (bearer(ALICE + "x"), bearer(ALICE[:-1]), bearer(""), {"X-Api-Key": ""}):
            status, _ = await server.post("/v1/completions", PROMPT, **headers)
            assert status == 401
        with pytest.raises(openai.AuthenticationError):
            await server.openai.models.list()
        assert (await server.openai.with_options(api_key=ALICE).models.list()).data


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    sha256 = hashlib.sha256(BOB.encode()).hexdigest()
    path.write_text(f'[alice]\nkey = "{ALICE}"\nrpm = 5\ntpm = 0\n[bob]\nsha256 = "{sha256}"\n')
    read = read_keys(path, "from-the-environment", KeyLimits(rpm=60, tpm=100))
    assert read == (
        ApiKey("alice", digest_of(ALICE), KeyLimits(rpm=5)),
        ApiKey("bob", digest_of(BOB), KeyLimits(60, 100)),
        ApiKey("default", digest_of("from-the-environment"), KeyLimits(60, 100)),
    )
    assert ALICE not in repr(read)
    assert read_keys(None, None, NO_LIMITS) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        (f"{ALICE}", "not valid TOML"),
        (f'alice = "{ALICE}"', "alice: must be a table"),
        ("[alice]", "needs either key or sha256"),
        (f'[alice]\nkey = "{ALICE}"\nsha256 = "00"', "needs either key or sha256"),
        ('[alice]\nkey = "short"', "8 characters or more"),
        ('[alice]\nsha256 = "xyz"', "64 hexadecimal digits"),
        (f'[alice]\nkey = "{ALICE}"\nrmp = 5', "unknown field 'rmp'"),
        (f'[alice]\nkey = "{ALICE}"\nrpm = -1', "rpm must be a whole number"),
        (f'["a b"]\nkey = "{ALICE}"', "a key's name"),
        (f'[alice]\nkey = "{ALICE}"\n[bob]\nkey = "{ALICE}"', "'alice' and 'bob' are the same"),
    ],
)
def test_bad_key_files_are_told_without_the_keys(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=message) as error:
        read_keys(path, None, NO_LIMITS)
    assert ALICE not in str(error.value)
    assert "\n" not in str(error.value)


# Limits


def test_a_bucket_fills_up_and_may_be_in_debt() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.take(90)
    assert bucket.wait(0) == pytest.approx(30)
    now[0] = 40.0
    assert (bucket.level, bucket.wait(10)) == (10.0, 0.0)
    now[0] = 500.0
    assert bucket.level == 60


def test_an_account_counts_what_is_produced() -> None:
    now = [0.0]
    account = Account("a", KeyLimits(tpm=600, max_streams=3), lambda: now[0])
    account.check(100, 2)
    account.begin(100, 2)
    account.spend(550)  # it is let run, and the next one waits
    with pytest.raises(Exception, match="600 tokens a minute") as refusal:
        account.check(1, 1)
    assert refusal.value.retry_after == pytest.approx(5.1)
    now[0] = 6.0
    account.check(1, 1)
    with pytest.raises(Exception, match="3 streams at once"):
        account.check(1, 2)
    account.end(2)
    account.check(1, 3)
    for never in ((601, 1), (1, 4)):
        with pytest.raises(RequestError):
            account.check(*never)


def test_durations_are_written_as_openai_does() -> None:
    assert [duration(s) for s in (0, 0.0199, 1, 1.46, 60, 359.2)] == [
        *("0ms", "20ms", "1s", "1.5s", "1m0s", "5m60s")
    ]


async def test_requests_a_minute_are_counted_for_each_key() -> None:
    limited = keys(alice=KeyLimits(rpm=2))
    async with running(engine(), keys=limited) as server:
        for remaining in ("1", "0"):
            async with server.http.post(
                f"{server.url}/v1/completions", json=PROMPT, headers=bearer(ALICE)
            ) as response:
                assert response.status == 200
                assert response.headers["x-ratelimit-limit-requests"] == "2"
                assert response.headers["x-ratelimit-remaining-requests"] == remaining
                assert response.headers["x-ratelimit-reset-requests"].endswith("s")
                assert "x-ratelimit-limit-tokens" not in response.headers
        alice = server.openai.with_options(api_key=ALICE)
        with pytest.raises(openai.RateLimitError) as error:
            await alice.completions.create(model="org/tiny", prompt="x")
        assert error.value.code == "rate_limit_exceeded"
        assert 1 <= int(error.value.response.headers["Retry-After"]) <= 30
        assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        # Lists of models are no work.
        assert (await alice.models.list()).data
        status, _ = await server.post("/v1/completions", PROMPT, **bearer(BOB))
        assert status == 200
        assert server.metric("chairlift_requests_rejected_total", reason="rate_limit") == 1


async def test_tokens_a_minute_count_prompt_and_output() -> None:
    async with running(engine("x" * 79), anonymous=KeyLimits(tpm=100)) as server:
        async with server.http.post(
            f"{server.url}/v1/completions", json={"prompt": "a" * 30, "stream": True}
        ) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == "70"
            await response.read()
        # 30 and 80 are 10 more than there were: the next request waits for those and its own.
        async with server.http.post(
            f"{server.url}/v1/completions", json={"prompt": "a" * 20}
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) == 18
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            assert (await response.json())["error"]["type"] == "tokens"
        status, body = await server.post("/v1/completions", {"prompt": "a" * 101})
        assert (status, "100 tokens a minute" in body["error"]["message"]) == (400, True)


async def test_streams_at_once_are_given_back() -> None:
    slow = engine("x" * 1000, step_seconds=0.01)
    async with running(slow, anonymous=KeyLimits(max_streams=2)) as server:
        async with server.http.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "n": 2, "stream": True}
        ) as response:
            await response.content.readany()
            status, body = await server.post("/v1/completions", PROMPT)
            assert (status, body["error"]["type"]) == (429, "streams")
        await until(lambda: slow.closed)  # the client has left
        slow.script = ending("short")
        status, _ = await server.post("/v1/completions", PROMPT)
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit"),
        ("/v1/completions", {"prompt": ["x"] * 4, "n": 7}, "prompt"),
        ("/v1/completions", {"prompt": "x", "timeout": 0}, "timeout"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 4097}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [1] * 2049}, "tokens"),
        ("/v1/completions", {"prompt": "x", "timeout": "5"}, "timeout"),
    ],
)
async def test_what_one_request_may_hold(path: str, body: dict[str, Any], param: str) -> None:
    async with running(engine()) as server:
        status, reply = await server.post(path, body)
        assert (status, reply["error"]["param"].startswith(param)) == (400, True)


# TLS, web pages, the metrics


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(certificate, append=True)
    settings = ServerSettings(port=0, ssl_certfile=certificate, ssl_keyfile=key)
    tls = Certificate.from_settings(settings)
    assert tls is not None
    runner = await listen(Service(settings), bind("127.0.0.1", 0), tls.context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    try:
        url = f"https://127.0.0.1:{runner.addresses[0][1]}/version"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as response:
            assert response.status == 200
    finally:
        await runner.cleanup()
    for settings, named in (
        (ServerSettings(ssl_certfile=tmp_path / "none.pem"), "none.pem: No such file"),
        (ServerSettings(ssl_certfile=key, ssl_keyfile=key), "no certificate with its key"),
        (ServerSettings(ssl_certfile=certificate), "no certificate with its key"),
    ):
        with pytest.raises(OSError, match=named):
            Certificate.from_settings(settings)


async def test_web_pages_may_call_only_from_the_origins_named() -> None:
    ours, other = "https://ours.example", "https://other.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    url = "/v1/chat/completions"
    async with running(engine(), cors_origins=(ours,), keys=keys()) as server:

        async def options(origin: str) -> aiohttp.ClientResponse:
            headers = {"Origin": origin, **ask}
            async with server.http.options(server.url + url, headers=headers) as response:
                return response

        preflight = await options(ours)
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == ours
        assert preflight.headers["Access-Control-Allow-Headers"] == "x-api-key"
        refused = await options(other)
        assert refused.status == 401
        assert "Access-Control-Allow-Origin" not in refused.headers
        headers = {"Origin": ours, **bearer(BOB)}
        async with server.http.post(
            server.url + url, json={**CHAT, "stream": True}, headers=headers
        ) as response:
            assert response.headers["Access-Control-Allow-Origin"] == ours
            exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
            assert {"X-Request-Id", "request-id", "Retry-After"} <= set(exposed)
            assert response.headers["Vary"] == "Origin"
    async with (
        running(engine()) as server,
        server.http.options(server.url + url, headers={"Origin": ours, **ask}) as response,
    ):
        assert response.status == 405
        assert not [name for name in response.headers if "access-control" in name.lower()]


async def test_metrics_on_a_port_of_their_own() -> None:
    async with running(engine(), metrics_port=0) as server:
        status, _ = await server.get("/metrics")
        assert status == 404
        scrapes = await listen_for_scrapes(server.service, bind("127.0.0.1", 0))
        try:
            address = f"http://127.0.0.1:{scrapes.addresses[0][1]}"
            async with server.http.get(f"{address}/metrics") as response:
                assert "chairlift_http_requests_total" in await response.text()
            async with server.http.get(f"{address}/v1/models") as response:
                assert response.status == 404
        finally:
            await scrapes.cleanup()


def test_which_addresses_are_open() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.5.5.5")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.org", "")))


# What is no HTTP, and what is no good template


async def raw(server: Running, data: bytes, seconds: float = 5.0) -> bytes:
    """What the server answers until it closes the connection."""
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
async def test_what_is_no_http_gets_an_error_and_is_not_logged(
    sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with running(engine()) as server:
        reply = await raw(server, sent)
        assert reply.startswith(b"HTTP/1.0 %d " % status), reply
        assert b'{"error":{"message":' in reply
        assert b"secret" not in reply
        assert server.metric("chairlift_requests_rejected_total", reason="malformed") == 1
        assert await server.get("/health")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert "secret" not in caplog.text
    assert "ssss" not in caplog.text


async def test_slow_heads_and_slow_bodies_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with running(engine(), idle_seconds=0.3, body_seconds=0.3) as server:
        assert await raw(server, b"GET /health HTTP/1.1\r\nHos") == b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        reply = await raw(server, head + b"Connection: close\r\nContent-Length: 50\r\n\r\n{", 20.0)
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_a_trace_tells_the_place_and_not_the_text() -> None:
    try:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise ValueError("secret") from error
    except ValueError as error:
        trace = redacted_traceback(error)
    assert "ValueError" in trace
    assert "caused by KeyError" in trace
    assert "test_doors.py" in trace
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


async def test_hostile_templates_end_and_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "TEMPLATE_SECONDS", 0.5)
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    hostile = (endless, "{{ ().__class__.__base__.__subclasses__() }}", "{{ range(10**9) }}")
    for template in hostile:
        async with running(engine()) as server:
            words = vocabulary.Vocabulary(byte_tokenizer(template), 258, server.service.workers)
            server.service.model().__dict__["vocabulary"] = words
            asked = [asyncio.create_task(server.post("/v1/chat/completions", CHAT)) for _ in "ab"]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(2):
                status, _ = await server.get("/health")
                assert status == 200
            for status, body in await asyncio.gather(*asked):
                assert (status, "chat template" in body["error"]["message"]) == (400, True)


async def test_limited_work_is_ended_in_its_thread() -> None:
    beats: list[int] = []

    def endless() -> None:
        while True:
            beats.append(1)

    limited = TimeLimitedThreads(0.1)
    for _ in range(3):  # more than there are threads
        with pytest.raises(TookTooLong):
            await limited.run(endless)
    left = asyncio.create_task(limited.run(endless))
    await asyncio.sleep(0.05)
    left.cancel()
    await asyncio.sleep(0.1)
    beaten = len(beats)
    await asyncio.sleep(0.1)
    assert beaten == len(beats) > 0
    assert await asyncio.gather(*(limited.run(lambda: 5) for _ in range(50))) == [5] * 50
    with pytest.raises(ZeroDivisionError):
        await limited.run(lambda: 1 // 0)
