"""Registrations that killed processes have left of Intel's OpenMP: harmless, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.engine.device import openmp

needs_mkl = pytest.mark.skipif(
    not any(Path(sys.prefix, "lib").glob("libmkl_rt.so*")) or not Path("/dev/shm").exists(),
    reason="MKL, which has this OpenMP, is not installed",
)

# The process writes the file for its own id: as if an earlier process with that id had left it.
_LOAD = """
import os, sys
from pathlib import Path
left = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}")
left.write_bytes(bytes.fromhex(sys.argv[1]))
from chairlift.engine.cpu.blas import load_fast_blas
assert load_fast_blas().name == "mkl"
import mlx.core as mx
product = mx.ones((256, 256)) @ mx.ones((256, 256))
assert product.sum().item() == 256**3
"""


@needs_mkl
@pytest.mark.parametrize(
    "left",
    [b"", b"\0" * 1024, b"nonsense", b"0x7f442b652750-cafe849e-libiomp5.so".ljust(1024, b"\0")],
    ids=["empty", "zeros", "nonsense", "another's"],
)
def test_a_killed_process_does_not_end_the_next_one_with_its_id(left: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, left.hex()],
        env={**os.environ, "CHAIRLIFT_BLAS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


_FULL = """
import errno, os
def fail(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")
os.posix_fallocate = fail
from chairlift.engine.cpu.blas import load_fast_blas
report = load_fast_blas()
print(report.name)
print(report.warning)
"""


@needs_mkl
def test_mkl_is_not_used_on_a_full_folder_where_it_would_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL],
        env={**os.environ, "CHAIRLIFT_BLAS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    name, warning = done.stdout.splitlines()
    assert name != "mkl"
    assert warning.count("MKL is not used, because /dev/shm is full") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has Accelerate elsewhere")
def test_a_folder_that_cannot_be_written_to_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "_FOLDERS", (tmp_path / "missing",))
    assert openmp.has_room()
    monkeypatch.setattr(openmp, "_FOLDERS", (tmp_path,))
    assert openmp.has_room()
    assert not list(tmp_path.iterdir())


def test_registrations_of_ended_processes_are_removed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "_FOLDERS", (tmp_path, tmp_path / "missing"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [f"__KMP_REGISTERED_LIB_{ended.pid}", f"__KMP_REGISTERED_LIB_{ended.pid}_0"]
    kept = [
        f"__KMP_REGISTERED_LIB_{os.getpid()}_0",
        "__KMP_REGISTERED_LIB_1",
        f"__KMP_REGISTERED_LIB_{ended.pid}_0.txt",
        f"of-somebody-{ended.pid}",
    ]
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    openmp.remove_abandoned_registrations()
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
