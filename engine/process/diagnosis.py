"""Checks whether and how fast this machine can serve, for ``chairlift doctor``."""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from chairlift.engine.cpu.blas import BlasReport, load_fast_blas
from chairlift.engine.device.backend import BackendError, conflict, install
from chairlift.engine.device.backend import advice as backend_advice
from chairlift.engine.device.open_files import import_mlx_lm
from chairlift.engine.hub.fetch import SMOLLM2
from chairlift.engine.process import python_build

_PACKAGES = ("chairlift", "mlx", "mlx-lm")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Each connection needs one open file; the server needs some more.
_ENOUGH_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: what was checked, in one or two words.
        value: what was found.
        advice: what would improve it; None if nothing would.
        serves: False if Chairlift cannot serve because of it.
    """

    topic: str
    value: str
    advice: str | None = None
    serves: bool = True


def diagnose(host: str, port: int) -> Iterator[Finding]:
    """Runs all checks for a server at this address. Imports MLX and computes with it."""
    yield _python()
    for package in _PACKAGES:
        yield _installed(package)
    # NOTE: this must come before anything imports MLX.
    blas = load_fast_blas()
    try:
        import_mlx_lm()
        from chairlift.engine.device import memory, profile

        on_cpu = profile.current().on_cpu
        yield _device()
    except Exception as error:
        # A failing import or driver: MLX raises many types.
        yield _no_device(error)
    else:
        if on_cpu:
            yield from _cpu(blas)
        yield _kernels(on_cpu)
        yield _memory(memory.free_memory())
    if _HUGE_PAGES.exists():
        yield _huge_pages(_HUGE_PAGES.read_text())
    yield _files()
    yield _port(host, port)


def speed_advice(blas: BlasReport) -> tuple[str, ...]:
    """One line about each thing that would make an engine on this machine faster.

    For an engine process that has loaded ``blas`` and MLX: it computes nothing.
    """
    from chairlift.engine.device import profile

    findings: list[Finding] = []
    if profile.current().on_cpu:
        findings += _cpu(blas)
        if _HUGE_PAGES.exists():
            findings.append(_huge_pages(_HUGE_PAGES.read_text()))
    findings.append(_files())
    return tuple(f"{each.topic}: {each.advice}" for each in findings if each.advice is not None)


def _cpu(blas: BlasReport) -> Iterator[Finding]:
    if sys.platform == "linux":
        yield _blas(blas.name, blas.warning)
        yield _matrix_units()
    yield _cores()


def _python() -> Finding:
    advice = (
        "pyenv built it without optimizations, and Python code takes 1.4 times as long: "
        "PYTHON_CONFIGURE_OPTS=--enable-optimizations pyenv install --force "
        f"{platform.python_version()}, then install Chairlift anew"
    )
    found = f"{platform.python_version()} on {platform.platform()}"
    return Finding("python", found, advice if python_build.is_unoptimized() else None)


def _installed(package: str) -> Finding:
    try:
        return Finding(package, version(package))
    except PackageNotFoundError:
        return Finding(package, "not installed", install(package), serves=False)


def _device() -> Finding:
    import mlx.core as mx

    from chairlift.engine.device import profile

    # A missing part of a driver or library shows only when something is computed.
    total = (mx.ones((64, 64)) @ mx.ones((64, 64))).sum().item()
    works = total == 64**3
    found = conflict()
    if not works:
        found = f"MLX computes wrongly here: {backend_advice()}"
    return Finding("device", f"{profile.current().kind}: {profile.name()}", found, works)


def _no_device(error: Exception) -> Finding:
    # Only the cause: the message of a `BackendError` also contains the advice.
    cause = error.__cause__ if isinstance(error, BackendError) and error.__cause__ else error
    text = " ".join(str(cause).split())[:300] or type(cause).__name__
    return Finding("device", f"MLX does not work: {text}", backend_advice(), serves=False)


def _blas(name: str | None, warning: str | None) -> Finding:
    advice = warning
    if name != "mkl" and platform.machine() == "x86_64":
        mkl = f"MKL is a sixth faster than OpenBLAS, at 940 MB on disk: {install('mkl')}"
        advice = mkl if advice is None else f"{advice}; {mkl}"
    return Finding("BLAS", name or "MLX's own", advice)


def _matrix_units() -> Finding:
    from chairlift.engine.cpu.compiled import amx_matmul, compiled_matmul

    if amx_matmul.available():
        return Finding("matrix units", "AMX for bfloat16, used")
    lacks = find_spec("llvmlite") is None
    if amx_matmul.has_units():
        advice = f"a compiled kernel would multiply with them: {install('llvmlite')}"
        return Finding("matrix units", "AMX for bfloat16, not used", advice if lacks else None)
    if compiled_matmul.available():
        return Finding("matrix units", "none; a compiled kernel multiplies")
    advice = f"a compiled kernel multiplies faster than a BLAS: {install('llvmlite')}"
    lacks = lacks and platform.machine() == "x86_64"
    return Finding("matrix units", "none", advice if lacks else None)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    busy = load > 0.5 * (cores or 1)
    advice = "other processes keep them busy, and every step waits for the slowest core"
    return Finding("cores", f"{cores}, load {load:.1f}", advice if busy else None)


def _kernels(on_cpu: bool) -> Finding:
    from chairlift.engine.cuda.paged.selftest import kernels_work

    if on_cpu:
        return Finding("kernels", "attention and activations on the host")
    if kernels_work():
        return Finding("kernels", "CUDA: attention over pages")
    if sys.platform == "darwin":
        return Finding("kernels", "MLX's own, on Metal")
    advice = "ours for CUDA did not compile, or were wrong here; the log says why"
    return Finding("kernels", "MLX's own", advice)


def _memory(free: int) -> Finding:
    enough = free > SMOLLM2.size
    advice = None if enough else "not even the default model fits: end something else"
    return Finding("free memory", f"{free / 1e9:.1f} GB where MLX computes", advice, enough)


def _huge_pages(setting: str) -> Finding:
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    advice = f"10 to 20 % more tokens a second on the CPU: echo madvise > {_HUGE_PAGES}"
    return Finding("huge pages", chosen, advice if chosen == "never" else None)


def _files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = limit == resource.RLIM_INFINITY or limit >= _ENOUGH_FILES
    shown = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
    advice = f"each connection takes one: ulimit -n {_ENOUGH_FILES}"
    return Finding("open files", shown, None if enough else advice)


def _port(host: str, port: int) -> Finding:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does, so that recently closed connections do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, ValueError) as error:  # an invalid name is a UnicodeError or a ValueError
        advice = "give the name or an address of this machine, and a port that you may use"
        reason: object = error
        if isinstance(error, OSError):
            reason = error.strerror
            if error.errno == errno.EADDRINUSE:
                advice = "another server may be running there: end it, or choose another --port"
        return Finding("port", f"{host}:{port}: {reason}", advice, serves=False)
    return Finding("port", f"{host}:{port} is free")
