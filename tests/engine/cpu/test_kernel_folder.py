import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chairlift.engine.cpu import kernel_folder
from chairlift.engine.cpu.kernel_folder import KernelFolder, lock_kernel_folder


def kernel(folder: KernelFolder, name: str, kind: str = "cpu") -> Path:
    path = folder.path / "mlx" / "0.1" / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"whole")
    return path


def test_engines_at_the_same_time_have_different_folders(tmp_path: Path) -> None:
    first, second = KernelFolder(tmp_path), KernelFolder(tmp_path)
    assert first.path != second.path
    first.close()
    third = KernelFolder(tmp_path)
    assert third.path == first.path
    second.close()
    third.close()


@pytest.mark.parametrize("kind", ["cpu", "ptx_cache", "ptx_cache/long_na"])
def test_only_recorded_kernels_stay(tmp_path: Path, kind: str) -> None:
    folder = KernelFolder(tmp_path)
    whole = kernel(folder, "libA.so", kind)
    folder.record()
    partial = kernel(folder, "libB.so", kind)
    folder.close()
    KernelFolder(tmp_path).close()
    assert whole.exists()
    assert not partial.exists()


@pytest.mark.parametrize("record", ["", "\0", "../../x"])
def test_a_damaged_record_costs_only_the_kernels(tmp_path: Path, record: str) -> None:
    folder = KernelFolder(tmp_path)
    whole = kernel(folder, "libA.so")
    (folder.path / "whole").write_text(record)
    folder.close()
    KernelFolder(tmp_path).close()
    assert not whole.exists()


def test_a_compiler_of_a_killed_engine_keeps_the_folder_locked(tmp_path: Path) -> None:
    script = f"""
import subprocess, time
from pathlib import Path
from chairlift.engine.cpu.kernel_folder import KernelFolder
folder = KernelFolder(Path({str(tmp_path)!r}))
compiler = subprocess.Popen(["sleep", "60"], close_fds=False)
print(compiler.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        compiler = int(engine.stdout.readline())
        engine.kill()
    other = KernelFolder(tmp_path)
    assert other.path.name == "1"
    other.close()
    os.kill(compiler, signal.SIGKILL)
    deadline = time.monotonic() + 180
    while (free := KernelFolder(tmp_path)).path.name != "0":
        free.close()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    free.close()


def test_without_a_folder_mlx_compiles_where_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/before")
    (tmp_path / "file").touch()
    assert lock_kernel_folder(tmp_path / "file") is None
    monkeypatch.setattr(kernel_folder, "MAX_FOLDERS", 0)
    assert lock_kernel_folder(tmp_path / "folders") is None
    assert os.environ["TMPDIR"] == "/before"


@pytest.mark.slow
def test_mlx_compiles_into_the_folder_and_loads_what_is_there(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from chairlift.engine.cpu.kernel_folder import lock_kernel_folder
folder = lock_kernel_folder(Path({str(tmp_path)!r}))
import mlx.core as mx
mx.set_default_device(mx.cpu)
print(mx.compile(lambda x: mx.exp(x) * mx.sin(x) + 1)(mx.zeros(3)).tolist())
folder.record()
"""
    times = []
    for _ in range(2):
        reply = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert reply.stdout == "[1.0, 1.0, 1.0]\n"
        (library,) = tmp_path.glob("0/mlx/*/cpu/*.so")
        times.append(library.stat().st_mtime_ns)
    assert times[0] == times[1]
