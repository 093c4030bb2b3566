"""Loads the fast BLAS before any test imports MLX, and drops the user's own API key."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.processes import keep_freed_memory, share_all_cores, share_one_core
from xdist.scheduler import LoadFileScheduling

from chairlift.engine.cpu.blas import load_fast_blas
from chairlift.engine.device.transformers_cache import cache_transformers_scan

# Neither imports nor collected tests are garbage; looking for some takes an eighth of the time.
if "PYTEST_XDIST_WORKER" in os.environ:  # the process that starts the others collects no tests
    gc.disable()
    # `make test` preloads an allocator for this process; servers and commands have the system's.
    os.environ.pop("LD_PRELOAD", None)
# With MLX's own BLAS on Linux the suite would take an hour. Test files run side by side, and so do
# their servers: threads that wait for each other's cores took twice the time of one thread.
for _library in ("OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
keep_freed_memory()
load_fast_blas()
cache_transformers_scan()

# A busy machine may stop any process for longer than Hypothesis's limit of 200 ms. Each run tries
# the same cases, so that a failure is due to the change; HYPOTHESIS_PROFILE=random tries new ones.
_EASY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("random", **_EASY)
settings.register_profile("fixed", derandomize=True, **_EASY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Servers in the tests would require it of clients.
os.environ.pop("OPENAI_API_KEY", None)


_SYSTEM = re.compile(r"^pytestmark = .*\bpytest\.mark\.system\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without system tests, skips the files that have no others: their imports take seconds."""
    if "not system" not in config.option.markexpr or not collection_path.match("test_*.py"):
        return None
    return bool(_SYSTEM.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the files with real servers in turn with those that have other slow tests, both first.

    Tests with servers often wait, and so do those of the API; the others use the cores meanwhile.
    The last file to run should be a short one, because the other workers are idle meanwhile.
    """
    system, slow = (
        dict.fromkeys(item.path for item in items if item.get_closest_marker(name))
        for name in ("system", "slow")
    )
    rest = dict.fromkeys(item.path for item in items if item.path not in {*system, *slow})
    waiting = [path for path in rest if "api" in path.parts]
    computing = [path for path in rest if "api" not in path.parts]
    places = {
        path: first + place / len(files)
        for first, files in ((1, waiting), (1, computing), (0, slow), (0, system))
        for place, path in enumerate(files)
    }
    items.sort(key=lambda item: places[item.path])


class _SharedServers(LoadFileScheduling):
    """A process takes whole files; one takes all those of clients, which share a server."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return "clients" if "/clients/" in scope else scope


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _SharedServers(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Keeps imported modules out of later collections of garbage, and collects less often.

    With Python's thresholds for older objects it took 44 s of CPU in a run, 28 of them for those.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 40, 40)
    gc.enable()


_NUMBER = int("0" + re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs a test on one core, unless it has servers that need more."""
    if item.get_closest_marker("system"):
        share_all_cores()
    else:
        share_one_core(_NUMBER)
