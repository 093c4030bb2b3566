"""The black box names the requests that an engine was computing when it died."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.engine.bench import Bench
from support.tiny import tiny_model

from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.process.blackbox import BlackBox, BlackBoxReader


def submit(bench: Bench, name: str, priority: int) -> None:
    params = SamplingParams(max_tokens=4, seed=1, temperature=0.0)
    bench.core.submit(Submit(name, [*range(5, 105)], params, priority=priority))


def test_a_prompt_whose_chunk_still_runs_is_listed(tmp_path: Path) -> None:
    bench = Bench(tiny_model("llama"), tokens=40)
    reader = BlackBoxReader(tmp_path / "box")
    bench.core.on_compute = BlackBox(tmp_path / "box").note
    (tmp_path / "box").unlink()  # as soon as both have opened it
    submit(bench, "first", priority=0)
    bench.step()
    assert reader.computing.keys() == {"first"}
    # It fills the next step, while the first request's chunk may still run on the device.
    submit(bench, "urgent", priority=-1)
    bench.step()
    assert reader.computing.keys() == {"first", "urgent"}
    bench.step()
    assert reader.computing.keys() == {"urgent"}
    bench.drain()
    assert len(bench.tokens("first")) == len(bench.tokens("urgent")) == 4


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_stops_no_step_and_lists_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    write, full = os.pwrite, False

    def limited(file: int, data: bytes, offset: int) -> int:
        if full and not room:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(file, data[: room if full else None], offset)

    monkeypatch.setattr(os, "pwrite", limited)
    bench = Bench(tiny_model("llama"), tokens=40)
    reader = BlackBoxReader(tmp_path / "box")
    bench.core.on_compute = BlackBox(tmp_path / "box").note
    submit(bench, "first", priority=0)
    bench.step()
    full = True
    submit(bench, "second", priority=-1)
    bench.step()
    assert reader.computing == {}
    full = False
    bench.step()
    assert reader.computing
    bench.drain()
    assert len(bench.tokens("first")) == len(bench.tokens("second")) == 4


def test_before_the_first_step_no_request_is_listed(tmp_path: Path) -> None:
    assert BlackBoxReader(tmp_path / "box").computing == {}
