"""Imports MLX, or explains in one line why that fails and which command fixes it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

# MLX's wheel for Linux contains no compiled library: `mlx/lib/libmlx.so` comes from one of these.
# If several are installed, keep the last of this list.
BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


class BackendError(ImportError):
    """MLX cannot be imported; the message is one line with the cause and the command to run."""


def import_mlx() -> None:
    """Imports ``mlx.core``.

    Raises:
        BackendError: MLX, its backend or a library that the backend needs is missing or broken.
    """
    try:
        import mlx.core  # noqa: F401
    except Exception as error:
        # A missing library is an ImportError; CUDA's driver may raise other kinds.
        raise BackendError(explain(error)) from error


def explain(error: Exception) -> str:
    """One line with the reason why the import of MLX failed, and the command to run."""
    cause = " ".join(str(error).split())[:300] or type(error).__name__
    return f"MLX cannot be imported ({cause}): {advice()}"


def advice() -> str:
    """The command that makes MLX's backend work, depending on the installed packages."""
    release = _version("mlx")
    if release is None:
        return f"run '{install('mlx')}'"
    found = installed_backends()
    if sys.platform != "linux":
        return f"run '{install('--force-reinstall', f'mlx=={release}')}'"
    if not found:
        return (
            f"no backend is installed, run '{install(f'mlx-cpu=={release}')}', "
            "or the same with mlx-cuda-13 or mlx-cuda-12 for an NVIDIA GPU"
        )
    again = install("--force-reinstall", "--no-deps", f"{found[-1]}=={release}")
    if found[-1] != "mlx-cpu":
        return f"check that NVIDIA's driver is installed (nvidia-smi), then run '{again}'"
    return f"run '{again}'"


def conflict() -> str | None:
    """The commands that resolve two installed backends, which overwrite each other; else None.

    Removing one removes the library of both, so the other has to be installed again.
    """
    found = installed_backends()
    if len(found) < 2:
        return None
    *others, keep = found
    again = install("--force-reinstall", "--no-deps", f"{keep}=={_version(keep)}")
    return f"run '{pip('uninstall', *others)}', then '{again}'"


def installed_backends() -> list[str]:
    """The packages of ``BACKENDS`` that are installed."""
    return [name for name in BACKENDS if _version(name) is not None]


def install(*arguments: str) -> str:
    """The command that installs packages beside this Python: see ``pip``."""
    return pip("install", *arguments)


def pip(command: str, *arguments: str) -> str:
    """A command line of pip for this Python; uv's where pip is absent, as in uv's environments."""
    if importlib.util.find_spec("pip") is not None:
        return " ".join([sys.executable, "-m", "pip", command, *arguments])
    return " ".join(["uv pip", command, "--python", sys.executable, *arguments])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
