"""A missing or broken MLX backend is a one-line error with a command, also in `doctor`."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from chairlift.engine.device import backend
from chairlift.engine.device.backend import BackendError, explain, import_mlx
from chairlift.engine.process.diagnosis import diagnose

CAUSE = "libmlx.so: cannot open\nshared object file"
PIP = f"{sys.executable} -m pip"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import mlx.core`` fails as it does without a backend."""
    original = builtins.__import__

    def fail(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "mlx.core":
            raise ImportError(CAUSE)
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", fail)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(backend, "_version", lambda name: "0.32.4" if name in packages else None)
    monkeypatch.setattr(backend.sys, "platform", "linux")


@pytest.mark.parametrize(
    ("packages", "command"),
    [
        ((), f"{PIP} install mlx'"),
        (("mlx",), f"{PIP} install mlx-cpu==0.32.4'"),
        (("mlx", "mlx-cpu"), f"{PIP} install --force-reinstall --no-deps mlx-cpu==0.32.4'"),
        (("mlx", "mlx-cuda-13"), "nvidia-smi"),
    ],
)
def test_the_advice_depends_on_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], command: str
) -> None:
    pretend_installed(monkeypatch, *packages)
    line = explain(ImportError(CAUSE))
    assert line.startswith(
        "MLX cannot be imported (libmlx.so: cannot open shared object file): run '"
        if packages in ((), ("mlx", "mlx-cpu"))
        else "MLX cannot be imported ("
    )
    assert command in line
    assert "\n" not in line


def test_two_backends_are_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "mlx", "mlx-cpu")
    assert backend.conflict() is None
    pretend_installed(monkeypatch, "mlx", "mlx-cpu", "mlx-cuda-13")
    assert backend.conflict() == (
        f"run '{PIP} uninstall mlx-cpu', then "
        f"'{PIP} install --force-reinstall --no-deps mlx-cuda-13==0.32.4'"
    )


def test_without_pip_the_advice_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _: None)
    assert backend.install("mkl") == f"uv pip install --python {sys.executable} mkl"


@pytest.mark.usefixtures("broken")
def test_a_failing_import_is_a_one_line_error() -> None:
    with pytest.raises(BackendError, match=r"MLX cannot be imported \(libmlx\.so"):
        import_mlx()


def test_serve_exits_with_one_line() -> None:
    code = (
        "import sys; sys.modules['mlx.core'] = None\n"
        "from chairlift.api.cli.main import main\n"
        "sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert "MLX cannot be imported (" in line


@pytest.mark.usefixtures("broken")
def test_the_doctor_names_the_cause_once() -> None:
    findings = {finding.topic: finding for finding in diagnose("127.0.0.1", 0)}
    device = findings["device"]
    assert not device.serves
    assert device.value == "MLX does not work: libmlx.so: cannot open shared object file"
    assert device.advice == backend.advice()
