"""Threads share a job's parts; a caller waits for none that has not begun."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.cpu import cores
from chairlift.engine.cpu.compiled import compiled_matmul, worker_threads
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix
from chairlift.engine.cpu.compiled.jobs import Program
from chairlift.engine.cpu.compiled.llvm import jobs as llvm_jobs
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import ACTIVE, PUBLISHED, READERS, shared
from chairlift.engine.cpu.compiled.worker_threads import LOOKING_SECONDS, WorkerThreads
from chairlift.engine.cpu.views import LastingMemory

pytestmark = pytest.mark.skipif(llvm_jobs.compiled() is None, reason="llvmlite is not installed")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerThreads]:
    """Threads of their own that compute all products."""
    monkeypatch.setattr(compiled_matmul, "MIN_SHARED_WEIGHTS", 0)
    own = WorkerThreads()
    monkeypatch.setattr(worker_threads, "shared", own)
    own.set(3)
    yield own
    own.looks = False


class Products:
    """Products of a matrix of several panels, and what they should be."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        weights = rng.normal(size=(400, 90)).astype(np.float32)
        self.matrix = CompiledMatrix([mx.array(weights)])
        self.x = rng.normal(size=(3, 90)).astype(np.float32)
        self._expected = self.x @ weights.T

    def check(self, count: int) -> None:
        for _ in range(count):
            assert np.allclose(self.matrix(self.x), self._expected, atol=1e-3)


def test_many_jobs_after_each_other_are_computed_whole(threads: WorkerThreads) -> None:
    products = Products()
    for looks in (True, False, True):
        threads.looks = looks
        for pause in (0.0, 0.0001, 0.01):
            products.check(200)
            time.sleep(pause)
    assert threads._state[PUBLISHED] == threads._state[READERS] == 0


@given(parts=st.integers(1, 300), workers=st.integers(1, 4), is_shared=st.booleans())
def test_each_part_is_computed_once(parts: int, workers: int, is_shared: bool) -> None:
    counts = np.zeros((50, parts), np.int64)
    program = Program()
    for line in counts:
        program.add(counting(), line.ctypes.data, parts=parts, is_shared=is_shared)
    own = WorkerThreads()
    own.set(workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_threads, "shared", own)
        program.run()
        program.run()
    own.looks = False
    assert np.all(counts == 2)


@functools.cache
def counting() -> Function:
    """A function that adds 1 to a number of each part."""
    body = """
  %at = getelementptr i64, ptr %counts, i64 %part
  %before_this = atomicrmw add ptr %at, i64 1 monotonic
  br label %part_end
"""
    compiler = host_compiler()
    assert compiler is not None
    return compiler.compile(shared("count", "ptr %counts", body)).function("count")


def test_the_number_of_threads_may_change(threads: WorkerThreads) -> None:
    products = Products()
    for count in (1, 4, 2, 1, 5):
        threads.set(count)
        products.check(50)
    assert len(threads._workers) == 4


def test_a_caller_does_not_wait_for_a_thread_that_has_not_begun(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    monkeypatch.setattr(worker_threads._Worker, "_serve", lambda self: blocked.wait(120))
    start = time.monotonic()
    Products().check(5)
    assert time.monotonic() - start < 60
    blocked.set()


def test_threads_without_jobs_sleep(threads: WorkerThreads) -> None:
    Products().check(20)
    assert 0 < threads.pauses < 1_000_000
    deadline = time.monotonic() + 60
    while not all(worker.sleeps for worker in threads._workers):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    Products().check(20)


@pytest.mark.parametrize("looks", [True, False])
def test_threads_stay_awake_until_a_program_ends(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """However long its jobs take that one thread computes alone."""
    monkeypatch.setattr(cores, "available", lambda: 2)
    threads.set(2)
    threads.looks = looks
    awake: list[tuple[bool, bool]] = []

    def compute_alone(job: int) -> None:
        begin = not threads._workers[0].sleeps
        time.sleep(20 * LOOKING_SECONDS)
        awake.append((begin, not threads._workers[0].sleeps))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compute_alone)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    program, products, memory = Program(), Products(), LastingMemory()
    products.matrix.multiply(products.x, memory, memory, program.add)
    program.add(Function(address, function), parts=1, is_shared=False)
    deadline = time.monotonic() + 60
    while (True, True) not in awake:
        assert time.monotonic() < deadline
        program.run()
    assert (True, False) not in awake
    assert threads._state[ACTIVE] == 0


def test_on_one_core_no_thread_is_woken(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr(worker_threads._Worker, "wake", lambda self: woken.append(1))
    monkeypatch.setattr(worker_threads._Worker, "_serve", lambda self: None)
    for available in (1, 2):
        monkeypatch.setattr(cores, "available", lambda available=available: available)
        Products().check(3)
        for worker in threads._workers:
            worker.sleeps = True
        Products().check(1)
        assert bool(woken) == (available > 1)


def test_a_caller_beside_another_computes_alone(threads: WorkerThreads) -> None:
    with threads._busy:
        assert not threads.run(0)
        Products().check(3)
