"""Limits of requests, tokens and streams for each key, and of one request's size."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.api.api_server import CHAT, ending, engine_replying, running, until
from support.api.credentials import ALICE, BOB, alice_and_bob, bearer

from chairlift.api.admission.keys import (
    KeyLimits,
)
from chairlift.api.admission.ratelimit import Account, Bucket, duration
from chairlift.engine.errors import RequestError

PROMPT = {"prompt": "x"}


def test_a_bucket_refills_and_may_be_in_debt() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.take(90)
    assert bucket.wait(0) == pytest.approx(30)
    now[0] = 40.0
    assert (bucket.level, bucket.wait(10)) == (10.0, 0.0)
    now[0] = 500.0
    assert bucket.level == 60


def test_an_account_counts_generated_tokens() -> None:
    now = [0.0]
    account = Account("a", KeyLimits(tpm=600, max_streams=3), lambda: now[0])
    account.check(100, 2)
    account.begin(100, 2)
    account.spend(550)  # over the limit: it goes on, and the next request waits
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
    limited = alice_and_bob(alice=KeyLimits(rpm=2))
    async with running(engine_replying("Hello"), keys=limited) as server:
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
        # Listing models does not count.
        assert (await alice.models.list()).data
        status, _ = await server.post("/v1/completions", PROMPT, **bearer(BOB))
        assert status == 200
        assert server.metric("chairlift_requests_rejected_total", reason="rate_limit") == 1


async def test_tokens_a_minute_count_prompt_and_output() -> None:
    async with running(engine_replying("x" * 79), anonymous=KeyLimits(tpm=100)) as server:
        async with server.http.post(
            f"{server.url}/v1/completions", json={"prompt": "a" * 30, "stream": True}
        ) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == "70"
            await response.read()
        # 30 + 80 tokens are 10 over the limit: the next request waits for these and for its own 20.
        async with server.http.post(
            f"{server.url}/v1/completions", json={"prompt": "a" * 20}
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) == 18
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            assert (await response.json())["error"]["type"] == "tokens"
        status, body = await server.post("/v1/completions", {"prompt": "a" * 101})
        assert (status, "100 tokens a minute" in body["error"]["message"]) == (400, True)


async def test_a_finished_stream_no_longer_counts() -> None:
    slow = engine_replying("x" * 1000, step_seconds=0.01)
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
async def test_one_requests_size_is_limited(path: str, body: dict[str, Any], param: str) -> None:
    async with running(engine_replying("Hello")) as server:
        status, reply = await server.post(path, body)
        assert (status, reply["error"]["param"].startswith(param)) == (400, True)
