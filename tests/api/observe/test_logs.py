"""Logs of both processes: their format, request ids, and no text of users."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.api.api_server import END, Running, ids, running
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.errors import QueueFull
from chairlift.engine.logs.setup import REQUEST_ID, TextFormatter, log_handler

SECRET = "Ljubljana"
BODY = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0}
SCRIPT = Scripted([*ids(SECRET), END], ended_by_token=True, cached_tokens=3)


@dataclass
class Log:
    """The JSON log of a server."""

    stream: io.StringIO = field(default_factory=io.StringIO)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def answered(self) -> list[dict[str, Any]]:
        """The lines of the access log."""
        return [line for line in self.lines if line["message"] == "answered"]


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    handler = log_handler("json", "api", log.stream)
    logger = logging.getLogger("chairlift")
    http = logging.getLogger("aiohttp")
    for each in (logger, http):
        each.addHandler(handler)
        each.setLevel("INFO")
    yield log
    for each in (logger, http):
        each.removeHandler(handler)
        each.setLevel("NOTSET")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(model_info(), lambda request, index: SCRIPT)) as server:
        yield server


async def test_a_finished_request_is_one_line(server: Running, log: Log) -> None:
    reply = await server.openai.chat.completions.create(model="org/tiny", **BODY, n=2)
    (line,) = log.answered
    assert line["method"] == "POST"
    assert line["route"] == "/v1/chat/completions"
    assert line["status"] == 200
    assert line["completion_id"] == reply.id
    assert reply.usage is not None
    assert line["prompt_tokens"] == reply.usage.prompt_tokens
    assert line["output_tokens"] == reply.usage.completion_tokens
    assert line["cached_tokens"] == 3
    assert line["finish_reason"] == "stop"
    assert (line["level"], line["process"]) == ("INFO", "api")
    assert line["seconds"] > line["decode_seconds"] > 0
    assert line["queue_seconds"] == pytest.approx(line["prefill_seconds"] / 3)
    assert SECRET not in log.text


async def test_aborted_and_refused_requests_are_logged_too(server: Running, log: Log) -> None:
    server.engine.step_seconds = 0.05
    stream = await server.openai.chat.completions.create(model="org/tiny", **BODY, stream=True)
    async with stream:
        await anext(aiter(stream))
    server.engine.refusal = QueueFull("full", 3)
    assert (await server.post("/v1/chat/completions", BODY))[0] == 429
    assert (await server.post("/v1/chat/completions", {"messages": SECRET}))[0] == 400
    assert (await server.http.request("PURGE", f"{server.url}/{SECRET}")).status == 404
    # BREW is not an HTTP method, so this is no request.
    assert (await server.http.request("BREW", f"{server.url}/{SECRET}")).status == 400
    aborted, refused, unmatched, invalid = sorted(log.answered, key=lambda line: -line["status"])
    assert (aborted["status"], aborted["finish_reason"]) == (499, "abort")
    assert 0 < aborted["output_tokens"] < len(SECRET)
    # It was refused before its prompt was tokenized.
    assert "prompt_tokens" not in refused
    assert "finish_reason" not in refused
    assert "queue_seconds" not in refused
    assert "prompt_tokens" not in invalid
    assert (unmatched["method"], unmatched["route"]) == ("other", "unmatched")
    assert len({line["request_id"] for line in (aborted, refused, invalid, unmatched)}) == 4
    assert SECRET not in log.text


async def test_polled_routes_are_logged_at_debug_level(server: Running, log: Log) -> None:
    await server.get("/health")
    assert not log.answered
    logging.getLogger("chairlift").setLevel("DEBUG")
    await server.get("/health")
    (line,) = log.answered
    assert line["level"] == "DEBUG"


async def test_a_clients_id_is_in_every_line_about_its_request(server: Running, log: Log) -> None:
    await server.post("/v1/chat/completions", {**BODY, "frobnicate": 1}, **{"X-Request-Id": "a-1"})
    await server.post("/v1/chat/completions", {**BODY, "frobnicate": 1}, **{"X-Request-Id": "a 1"})
    warning, answered, second_warning, second_answered = log.lines
    assert warning["request_id"] == answered["request_id"] == "a-1"
    assert second_warning["request_id"] == second_answered["request_id"] != "a 1"
    assert REQUEST_ID.get() is None


def test_the_text_format() -> None:
    record = logging.makeLogRecord(
        {
            "name": "chairlift.api",
            "levelname": "INFO",
            "levelno": logging.INFO,
            "msg": "answered %d",
        }
        | {"args": (5,), "request_id": "a-1", "seconds": 0.123456, "choice": None}
    )
    line = TextFormatter("engine").format(record)
    assert line.endswith(" INFO engine chairlift.api: answered 5 request_id=a-1 seconds=0.1235")
    record.levelno = logging.CRITICAL
    assert TextFormatter("engine").format(record) == "chairlift: error: answered 5"


ENGINE = """
import logging
from chairlift.engine.logs.setup import set_up_logs
set_up_logs("info", "json", "engine")
logging.getLogger("chairlift.engine").info("ready", extra={"seconds": 1.5})
logging.getLogger("chairlift.engine").debug("hidden")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("transformers").exception("oh")
raise ValueError("the end")
"""


def test_json_has_one_object_per_line_even_for_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=180, check=False
    )
    ready, caught, uncaught = map(json.loads, done.stderr.splitlines())
    assert ready.pop("time")
    assert ready == {
        "level": "INFO",
        "logger": "chairlift.engine",
        "message": "ready",
        "process": "engine",
        "seconds": 1.5,
    }
    assert caught["exception"].endswith("ZeroDivisionError: division by zero")
    assert uncaught["level"] == "ERROR"
    assert "the end" in uncaught["exception"]
