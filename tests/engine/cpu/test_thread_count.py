"""The BLAS uses as many threads as cores are free, and beside other load keeps a fair share."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import TESTS

from chairlift.engine.config import EngineConfig
from chairlift.engine.cpu import cores, thread_count
from chairlift.engine.cpu.cores import CoreUsage
from chairlift.engine.cpu.thread_count import INTERVAL, MAX_PATIENCE, Policy, ThreadWatch

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _run(policy: Policy, seconds: float, others: float, waited: float, at: float) -> float:
    """Lets time pass beside other processes; returns the new time."""
    for _ in range(round(seconds / INTERVAL)):
        before = CoreUsage(at, 0.0, 0.0)
        at += INTERVAL
        policy.decide(before, CoreUsage(at, others * INTERVAL, waited * INTERVAL))
    return at


@given(st.integers(1, 128), st.integers(1, 128), st.lists(st.floats(0, 200), max_size=60))
def test_threads_stay_within_bounds(threads: int, available: int, load: list[float]) -> None:
    policy, at = Policy(threads, available), 0.0
    for others in load:
        at = _run(policy, INTERVAL, others, others, at)
        assert 1 <= policy.threads <= threads


@given(st.integers(2, 64), st.floats(0, 3))
def test_an_undisturbed_engine_keeps_all_threads(cores_: int, others: float) -> None:
    policy = Policy(cores_, cores_)
    _run(policy, 30, others=min(others, 0.39), waited=0.3, at=0)
    assert policy.threads == cores_
    _run(policy, 30, others=others, waited=0.0, at=100)  # other load, but no thread waits
    assert policy.threads == cores_


@given(st.integers(2, 64), st.integers(1, 200))
def test_waiting_threads_are_reduced_to_the_free_cores(cores_: int, busy: int) -> None:
    policy = Policy(cores_, cores_)
    others = float(min(busy, cores_))
    at = _run(policy, INTERVAL, others, waited=1.0, at=0)
    assert policy.threads == max(1, cores_ - int(others))
    at = _run(policy, 60, others, waited=0.9, at=at)
    assert policy.threads == max(1, cores_ - int(others))
    _run(policy, 3, others=0.1, waited=0.0, at=at)
    assert policy.threads == cores_, "the threads return"


def test_cores_that_only_seem_free_are_tried_less_and_less_often() -> None:
    policy, at, raises = Policy(2, 2), 0.0, []
    for _ in range(4 * 600):
        threads = policy.threads
        # With one thread, cores are idle; with two, other processes need them.
        others, waited = (0.0, 0.0) if threads == 1 else (1.5, 1.0)
        at = _run(policy, INTERVAL, others, waited, at)
        if policy.threads > threads:
            raises.append(at)
    gaps = [after - before for before, after in itertools.pairwise(raises)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= MAX_PATIENCE
    assert len(raises) < 25


def test_a_cgroups_cpu_limit_is_read(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert cores.quota(proc, cgroups) is None
    own = cgroups / "pod" / "container"
    own.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    assert cores.quota(proc, cgroups) is None
    (own / "cpu.max").write_text("max 100000\n")
    assert cores.quota(proc, cgroups) is None
    (own / "cpu.max").write_text("250000 100000\n")
    assert cores.quota(proc, cgroups) == 2.5
    (own.parent / "cpu.max").write_text("150000 100000\n")
    assert cores.quota(proc, cgroups) == 1.5
    # Version 1, with a path of the host.
    (proc / "self" / "cgroup").write_text("4:memory:/x\n3:cpu,cpuacct:/docker/abc\n")
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores.quota(proc, cgroups) is None
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("300000")
    assert cores.quota(proc, cgroups) == 3.0
    (proc / "self" / "cgroup").write_text("nonsense")
    assert cores.quota(proc, cgroups) is None


class _Setting:
    def __init__(self, threads: int) -> None:
        self.threads = threads

    def get(self) -> int:
        return self.threads

    def set(self, threads: int) -> None:
        self.threads = threads


def test_a_fixed_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = _Setting(8)
    with ThreadWatch(setting, fixed=3):
        assert setting.threads == 3
    assert setting.threads == 8
    monkeypatch.setattr(cores, "quota", lambda: 1.4)
    with ThreadWatch(setting):
        assert setting.threads == 1
    with ThreadWatch(None):
        pass
    for wrong in (0, -1, 5000):
        with pytest.raises(ValueError, match="threads"):
            EngineConfig(threads=wrong)


def test_the_watch_follows_the_machines_load(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [CoreUsage(0.0, 0.0, 0.0)]
    load = [2.0]

    def usage() -> CoreUsage:
        last = now[0]
        now[0] = CoreUsage(last.at + 1, last.others + load[0], last.waited + load[0] / 2)
        return now[0]

    monkeypatch.setattr(cores, "usage", usage)
    monkeypatch.setattr(cores, "quota", lambda: None)
    monkeypatch.setattr(cores, "available", lambda: 4)
    setting = _Setting(4)
    with ThreadWatch(setting):
        _until(lambda: setting.threads == 2)
        load[0] = 0.0
        _until(lambda: setting.threads == 4)


def test_a_paused_watch_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[float] = []

    def usage() -> CoreUsage:
        readings.append(time.monotonic())
        return CoreUsage(readings[-1], 0.0, 0.0)

    monkeypatch.setattr(thread_count, "INTERVAL", 0.01)
    monkeypatch.setattr(cores, "usage", usage)
    monkeypatch.setattr(cores, "quota", lambda: None)
    with ThreadWatch(_Setting(4)) as watch:
        _until(lambda: len(readings) > 3)
        with watch.paused():
            time.sleep(0.1)
            before = len(readings)
            time.sleep(0.2)
            assert len(readings) == before
        _until(lambda: len(readings) > before + 3)
        with watch.paused():
            pass  # leaving both contexts ends the thread


def _until(reached: object) -> None:
    assert callable(reached)
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@linux
def test_other_processes_cpu_time_is_measured() -> None:
    before = cores.usage()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(1)
        now = cores.usage()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert now.others - before.others > 0.5
    assert now.waited >= before.waited
    assert cores.available() >= 1


# The limit of a step's time, as a multiple of its fair share. Measured on a loaded machine: 0.4 to
# 1.1, and with two threads throughout 2.3 to 3.8.
MAX_SLOWDOWN = 2.0

# Child processes inherit the tests' policy, with which threads that wake do not preempt others. A
# process whose threads wait for each other would then get less than its share.
_USUAL_POLICY = "import os; os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\n"
# Decodes with one row, and prints wall and CPU seconds of a step, for windows of a quarter of a
# second: first with one thread, then as the engine does.
_DECODE = """
import json, sys, time
sys.path.insert(0, {tests!r})
from chairlift.engine.cpu import blas
blas._accelerator_expected = lambda: False
if {openblas}:
    blas._SYSTEM_LIBRARIES, blas._installed_mkl = (), lambda: []
name = blas.load_fast_blas().name
from chairlift.engine.device.open_files import import_mlx_lm
import_mlx_lm()
import mlx.core as mx
from chairlift.cache.kinds import make_batch
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.cpu.thread_count import ThreadWatch, blas_threads
from chairlift.loadtest.shapes import SHAPES, random_model
config = SHAPES["smollm2-135m"] | {{"num_hidden_layers": 6, "vocab_size": 4000}}
model = random_model(config, mx.float32)
accelerate(model, exactly=False)
cache = make_batch(model)
cache.join(columns=4000)
def step():
    with cache.step(1):
        mx.eval(model(mx.array([[1]]), cache=cache.layers), cache.state)
def windows(count):
    found = []
    for _ in range(count):
        start, own, steps = time.perf_counter(), time.process_time(), 0
        while steps < 3 or time.perf_counter() - start < 0.25:
            step()
            steps += 1
        wall, cpu = time.perf_counter() - start, time.process_time() - own
        found.append((wall / steps, cpu / steps))
    return found
threads = blas_threads()
step()
print("ready", flush=True)
sys.stdin.readline()
with ThreadWatch(threads, fixed=1):
    alone = min(cpu for _, cpu in windows(2))
with ThreadWatch(threads):
    windows(2)  # threads are fewer after the first look at the machine
    print(json.dumps([name, alone, [wall for wall, _ in windows(3)]]))
"""
_BUSY = """
import sys, time
start, own = time.perf_counter(), time.process_time()
while True:
    print((time.process_time() - own) / (time.perf_counter() - start), flush=True)
    end = time.perf_counter() + 0.25
    while time.perf_counter() < end:
        pass
"""


def _slowdown(openblas: bool, busy: int) -> float:
    """The time of a step beside busy processes, as a multiple of its fair share."""
    code = _USUAL_POLICY + _DECODE.format(tests=str(TESTS), openblas=openblas)
    pipe = subprocess.PIPE
    decoding = subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert decoding.stdout is not None
    # They would disturb imports, too, which take a while.
    ready = decoding.stdout.readline()
    others = [
        subprocess.Popen([sys.executable, "-c", _USUAL_POLICY + _BUSY], stdout=pipe, text=True)
        for _ in range(busy)
    ]
    try:
        printed, errors = decoding.communicate("\n")
    finally:
        for process in others:
            process.kill()
    # The last line of each process is its share of a core.
    shares = [float(process.communicate()[0].split()[-1]) for process in others]
    assert ready == "ready\n", errors
    assert decoding.returncode == 0, errors
    name, alone, walls = json.loads(printed)
    assert (name == "scipy-openblas32") is openblas
    fair: float = alone / (sum(shares) / len(shares))
    return statistics.median(walls) / fair


@pytest.mark.system
@linux
@pytest.mark.parametrize(("openblas", "busy"), [(False, 2), (True, 4)])
def test_beside_busy_processes_a_step_takes_its_fair_share(openblas: bool, busy: int) -> None:
    if not openblas and not any(Path(sys.prefix, "lib").glob("libmkl_rt.so*")):
        pytest.skip("mkl is not installed")
    # The best of three attempts, since other tests may run on this machine.
    assert any(_slowdown(openblas, busy) < MAX_SLOWDOWN for _ in range(3))
