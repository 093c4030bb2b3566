"""Batches with OpenAI's client: results, errors, cancelling, expiry, keys, priorities, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.api_server import MESSAGES, Running, engine_replying, running, until
from support.api.batches import ENDED, begin, ended, lines, request, results, upload

from chairlift.api.admission.keys import ApiKey, KeyLimits, digest_of
from chairlift.engine.errors import QueueFull
from chairlift.engine.messages import MAX_PRIORITY


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


async def test_a_batch_answers_every_request(server: Running) -> None:
    client = server.openai
    batch = await begin(client, lines(*map(request, range(20))), metadata={"a": "b"})
    assert (batch.status, batch.model) == ("validating", "org/tiny")
    assert batch.expires_at == batch.created_at + 86400
    batch = await ended(client, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.error_file_id is None
    assert batch.errors is None
    assert batch.usage is not None
    assert batch.usage.output_tokens == 20 * 6
    found = await results(client, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"r{number}" for number in range(20)]
    assert len({line["id"] for line in found}) == 20
    for line in found:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        body = line["response"]["body"]
        assert (body["object"], body["choices"][0]["message"]["content"]) == (
            "chat.completion",
            "Hello",
        )
    file = await client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {submit.priority for submit in server.engine.submitted} == {MAX_PRIORITY}
    assert server.metric("chairlift_batches_total", status="completed") == 1
    assert server.metric("chairlift_batch_requests_total", outcome="completed") == 20
    assert server.metric("chairlift_num_batch_requests_running") == 0


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "a"}, "text_completion"),
        ("/v1/embeddings", {"input": "a"}, "list"),
        ("/v1/responses", {"input": "a"}, "response"),
    ],
)
async def test_every_endpoint(server: Running, url: str, body: dict[str, Any], kind: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    batch = await ended(server.openai, (await begin(server.openai, lines(line), url)).id)
    (found,) = await results(server.openai, batch.output_file_id)
    assert found["response"]["body"]["object"] == kind
    used = found["response"]["body"]["usage"]
    assert batch.usage is not None
    assert batch.usage.total_tokens == used["total_tokens"] > 0


async def test_a_failed_request_is_in_the_error_file(server: Running) -> None:
    bad = request(1, temperature="hot")
    batch = await begin(server.openai, lines(request(0), bad, request(2, max_tokens=10**6)))
    batch = await ended(server.openai, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    found = await results(server.openai, batch.error_file_id)
    assert [line["custom_id"] for line in found] == ["r1", "r2"]
    for line, param in zip(found, ["temperature", "max_tokens"], strict=True):
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["param"] == param


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (lines(request(0)) + b"{", "invalid_json_line", 2),
        (b"\n" + b"[]\n", "invalid_json_line", 2),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 100_000, "invalid_json_line", 1),
        (lines(request(0), request(1), request(0)), "duplicate_custom_id", 3),
        (lines({**request(0), "custom_id": 5}), "invalid_custom_id", 1),
        (lines({**request(0), "custom_id": ""}), "invalid_custom_id", 1),
        (lines({**request(0), "method": "GET"}), "invalid_method", 1),
        (lines(request(0, "/v1/completions")), "invalid_url", 1),
        (lines({**request(0), "url": "http://x/v1/chat/completions"}), "invalid_url", 1),
        (lines({**request(0), "body": "x"}), "invalid_body", 1),
        (lines({"custom_id": "a", "method": "POST", "url": request(0)["url"]}), "invalid_body", 1),
        (lines(request(0, model="gpt-4o")), "model_not_found", 1),
        (lines(request(0, stream=True)), "unsupported_parameter", 1),
        (lines(request(0, background=True)), "unsupported_parameter", 1),
        (lines(request(0, priority=-1)), "unsupported_parameter", 1),
    ],
)
async def test_wrong_lines_are_named(
    server: Running, content: bytes, code: str, line: int | None
) -> None:
    batch = await ended(server.openai, (await begin(server.openai, content)).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
    assert server.engine.submitted == []


async def test_neutral_values_are_accepted(server: Running) -> None:
    content = lines(request(0, stream=False, model=None, priority=None))
    batch = await ended(server.openai, (await begin(server.openai, content.strip())).id)
    assert batch.status == "completed"


async def test_limits_of_lines() -> None:
    limits = {"max_batch_requests": 2, "max_body_bytes": 4096}
    async with running(engine_replying("a"), **limits) as server:
        for content, code in (
            (lines(*map(request, range(3))), "too_many_requests"),
            (lines(request(0, user="x" * 5000)), "line_too_long"),
        ):
            batch = await ended(server.openai, (await begin(server.openai, content)).id)
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert [error.code for error in batch.errors.data] == [code]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
async def test_wrong_batches_are_refused(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    file_id = await upload(server.openai, lines(request(0)))
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    status, reply = await server.post("/v1/batches", body | fields)
    assert status == (404 if param == "input_file_id" else 400)
    assert reply["error"]["param"].startswith(param)


async def test_an_output_is_no_input(server: Running) -> None:
    batch = await ended(server.openai, (await begin(server.openai, lines(request(0)))).id)
    with pytest.raises(openai.BadRequestError, match="must be batch"):
        await server.openai.batches.create(
            input_file_id=batch.output_file_id or "",
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )


async def test_pages_of_batches(server: Running) -> None:
    made = [(await begin(server.openai, lines(request(0)))).id for _ in range(5)]
    listed = [batch.id async for batch in server.openai.batches.list(limit=2)]
    assert listed == made[::-1]
    page = await server.openai.batches.list(limit=2, after=made[3])
    assert [batch.id for batch in page.data] == [made[2], made[1]]
    assert page.has_more
    status, listing = await server.get(f"/v1/batches?order=asc&limit=2&after={made[0]}")
    assert status == 200
    assert [batch["id"] for batch in listing["data"]] == made[1:3]
    for query in ("limit=0", "limit=101", "limit=x", "after=batch_none", "order=x"):
        assert (await server.get(f"/v1/batches?{query}"))[0] == 400


@pytest.mark.slow
async def test_cancelling_keeps_the_results_so_far() -> None:
    engine = engine_replying("Hello", step_seconds=0.05)
    async with running(engine, batch_concurrency=2) as server:
        client = server.openai
        batch = await begin(client, lines(*map(request, range(30))))
        async with asyncio.timeout(180):
            while batch.request_counts is None or batch.request_counts.completed < 3:
                batch = await client.batches.retrieve(batch.id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at is not None
        assert batch.cancelled_at is not None
        done = await results(client, batch.output_file_id)
        missing = await results(client, batch.error_file_id)
        assert {line["error"]["code"] for line in missing} == {"batch_cancelled"}
        ids = [line["custom_id"] for line in (*done, *missing)]
        assert sorted(ids) == sorted(f"r{number}" for number in range(30))
        assert 3 <= len(done) < 30
        assert engine.unfinished == 0
        with pytest.raises(openai.BadRequestError, match="status 'cancelled'"):
            await client.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel("batch_none")


async def test_a_batch_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "chairlift.api.openai.batches.batch_handlers.window_seconds", lambda window: 2
    )
    engine = engine_replying("Hello", first_step_seconds=0.4)
    async with running(engine, batch_concurrency=1) as server:
        batch = await begin(server.openai, lines(*map(request, range(30))))
        batch = await ended(server.openai, batch.id)
        assert batch.status == "expired"
        done = await results(server.openai, batch.output_file_id)
        missing = await results(server.openai, batch.error_file_id)
        assert len(done) + len(missing) == 30
        assert done
        assert {line["error"]["code"] for line in missing} == {"batch_expired"}
        assert [line["response"] for line in missing] == [None] * len(missing)


async def test_a_request_that_cannot_run_now_is_tried_again() -> None:
    engine = engine_replying("Hello")
    engine.refusal = QueueFull("full", 0.1)
    async with running(engine) as server:
        batch = await begin(server.openai, lines(request(0)))
        await asyncio.sleep(0.5)
        assert (await server.openai.batches.retrieve(batch.id)).status == "in_progress"
        engine.refusal = None
        batch = await ended(server.openai, batch.id)
        assert batch.error_file_id is None


def keys(*names: str, limits: KeyLimits | None = None) -> tuple[ApiKey, ...]:
    return tuple(ApiKey(name, digest_of(f"{name}-secret"), limits or KeyLimits()) for name in names)


async def test_a_key_sees_its_own_files_and_batches_only() -> None:
    async with running(engine_replying("Hello"), keys=keys("ann", "bob")) as server:
        ann = server.openai.with_options(api_key="ann-secret")
        bob = server.openai.with_options(api_key="bob-secret")
        batch = await ended(ann, (await begin(ann, lines(request(0)))).id)
        assert [file.id async for file in bob.files.list()] == []
        assert [one.id async for one in bob.batches.list()] == []
        output = batch.output_file_id or ""
        calls: list[Callable[[], Any]] = [
            lambda: bob.files.retrieve(output),
            lambda: bob.files.content(output),
            lambda: bob.files.delete(output),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            ),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call()
        with pytest.raises(openai.AuthenticationError):
            await server.openai.files.list()
        assert len(await results(ann, output)) == 1


async def test_a_batch_leaves_the_limits_of_its_key_to_other_requests() -> None:
    limits = KeyLimits(rpm=30, max_streams=2)
    async with running(engine_replying("Hello"), keys=keys("ann", limits=limits)) as server:
        ann = server.openai.with_options(api_key="ann-secret")
        batch = await ended(ann, (await begin(ann, lines(*map(request, range(20))))).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 20
        await ann.chat.completions.create(model="org/tiny", messages=MESSAGES)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_batches_leave_rows_to_other_requests() -> None:
    engine = engine_replying("Hello", step_seconds=0.02)
    async with running(engine, batch_concurrency=3) as server:
        most = 0
        batch = await begin(
            server.openai,
            lines(*map(request, range(10)), *(request(20 + i, n=2) for i in range(5))),
        )
        while (await server.openai.batches.retrieve(batch.id)).status not in ENDED:
            most = max(most, int(server.metric("chairlift_num_batch_requests_running") or 0))
        assert 1 < most <= 3


async def test_a_batch_waits_for_a_server_of_its_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"file_dir": tmp_path, "batch_concurrency": 1}
    async with running(engine_replying("a", first_step_seconds=0.2), **settings) as server:
        batch = await begin(server.openai, lines(*map(request, range(8))))
        await until(lambda: len(server.engine.submitted) >= 3)
    other = engine_replying("b")
    async with running(other, name="another", **settings) as server:
        assert (await server.openai.batches.retrieve(batch.id)).status == "in_progress"
        await asyncio.sleep(1.5)
        assert other.submitted == []
    async with running(engine_replying("c"), **settings) as server:
        batch = await ended(server.openai, batch.id)
        found = await results(server.openai, batch.output_file_id)
        assert [line["custom_id"] for line in found] == [f"r{number}" for number in range(8)]
        texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in found]
        assert texts[0] == "a"
        assert texts[-1] == "c"
