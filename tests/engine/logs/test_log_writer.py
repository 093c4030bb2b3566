"""The log writer never blocks, whether or not its output is read."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.api.server_process import PATIENCE, linux

from chairlift.engine.logs.writer import LogWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    for end in (reads, writes):
        os.close(end)


def read(end: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(end, size - len(data))
    return data


def test_lines_arrive_complete_and_in_order(pipe: tuple[int, int]) -> None:
    lines = [f"{number} {'ü' * (number % 50)}\n" for number in range(5000)]
    writer = LogWriter(pipe[1])
    expected = "".join(lines).encode()
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(read(pipe[0], len(expected))))
    reader.start()
    for line in lines:
        writer.write(line)
    reader.join(PATIENCE)
    assert received == [expected]
    assert writer.finish(PATIENCE)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stops_blocks_nothing_and_learns_how_many_lines_it_missed(
    pipe: tuple[int, int], blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    os.set_blocking(pipe[1], blocking)
    writer = LogWriter(pipe[1], max_chars=100_000)
    began = time.monotonic()
    for number in range(10_000):
        writer.write(f"{number:99d}\n")
    assert not writer.finish(0.05)
    assert time.monotonic() - began < 10
    assert writer._chars <= 100_000
    received = b""
    while not writer.finish(0.001):
        received += os.read(pipe[0], 65_536)
    os.set_blocking(pipe[0], False)
    with suppress(BlockingIOError):
        while True:
            received += os.read(pipe[0], 65_536)
    numbers = [int(line) for line in received.splitlines()]
    assert numbers == sorted({*numbers})
    assert numbers[:1000] == list(range(1000))
    assert len(numbers) < 10_000
    deadline = time.monotonic() + PATIENCE
    while sum(record.args[0] for record in caplog.records) < 10_000 - len(numbers):  # type: ignore
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "lines of the log were lost" in caplog.text
    assert sum(record.args[0] for record in caplog.records) == 10_000 - len(numbers)  # type: ignore


@pytest.mark.parametrize("place", ["closed pipe", "full disk", "no file"])
def test_lines_that_cannot_be_written_are_dropped_without_an_error(place: str) -> None:
    if place == "full disk" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    reads, end = os.pipe() if place == "closed pipe" else (None, os.open(os.devnull, os.O_WRONLY))
    if reads is not None:
        os.close(reads)
    if place == "full disk":
        os.close(end)
        end = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(end)
    if place == "no file":
        os.close(end)
    for _ in range(1000):
        writer.write("x" * 1000 + "\n")
    assert writer.finish(PATIENCE)
    if place != "no file":
        os.close(end)


SCRIPT = """
import logging
from chairlift.engine.logs.setup import set_up_logs
set_up_logs("info", "json", "api")
for number in range(2000):
    logging.getLogger("chairlift").info("x" * 200, extra={"number": number})
"""


@linux
@pytest.mark.parametrize("reads", [True, False])
def test_a_process_writes_its_log_before_it_ends_or_gives_up_soon(reads: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        if reads:
            lines = [json.loads(line) for line in process.stderr]
            assert [line["number"] for line in lines] == list(range(2000))
        assert process.wait(PATIENCE) == 0
