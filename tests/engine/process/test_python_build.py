"""Which Pythons are optimized, and which of them the Makefile takes."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.paths import ROOT

from chairlift.engine.process import diagnosis, python_build

_PYENV = "'--prefix=/root/.pyenv/versions/3.11.7' '--enable-shared'"
_DEBIAN = "'--enable-shared' '--prefix=/usr' '--without-ensurepip'"


@pytest.mark.parametrize(
    ("options", "unoptimized"),
    [
        (_PYENV, True),
        (f"{_PYENV} '--enable-optimizations' '--with-lto'", False),
        (_DEBIAN, False),
        (None, False),  # Windows has no such variable
    ],
)
def test_pyenv_does_not_optimize_by_default(
    options: str | None, unoptimized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": options}.get)
    assert python_build.is_unoptimized() == unoptimized
    advice = diagnosis._python().advice
    assert ("--enable-optimizations" in advice) if advice else not unoptimized


@pytest.mark.parametrize(
    ("version", "makes"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)]
)
def test_an_environment_needs_a_supported_version(
    version: tuple[int, int], makes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert python_build.makes_environments() == makes


def _python_of(folder: Path, pythons: Sequence[str | Path], *variables: str) -> str:
    """The Python that the Makefile takes where there is no environment yet."""
    show = folder / "show.mk"
    show.write_text(f"include {ROOT}/Makefile\nshow: ; @echo $(PYTHON)\n")
    tried = "PYTHONS=" + " ".join(map(str, pythons))
    command = ["make", "-s", "-f", str(show), "show", f"VENV={folder}/none", tried, *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_makefile_takes_the_first_that_is_suitable(tmp_path: Path) -> None:
    scripts = {}
    for name, code in (("slow", 1), ("fast", 0), ("faster", 0)):
        scripts[name] = tmp_path / name
        # Instead of a Python: the exit status of the file that it is given.
        scripts[name].write_text(
            f'#!/bin/sh\n[ "$1" = engine/process/python_build.py ] && exit {code}\n'
        )
        scripts[name].chmod(0o755)
    slow, fast, faster = scripts.values()
    assert _python_of(tmp_path, ["missing", slow, fast, faster]) == f"{fast}\n"
    assert _python_of(tmp_path, [slow]) == "python3\n"
    assert _python_of(tmp_path, [fast], "PYTHON=mine") == "mine\n"


def test_the_script_decides_as_its_functions_do() -> None:
    script = Path(python_build.__file__)
    done = subprocess.run([sys.executable, str(script)], check=False)
    suitable = python_build.makes_environments() and not python_build.is_unoptimized()
    assert (done.returncode == 0) == suitable


@pytest.mark.parametrize("works", [True, False])
def test_the_makefile_keeps_an_environment_that_works(works: bool, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def tool(path: Path, code: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {calls}\nexit {code}\n')
        path.chmod(0o755)

    (tmp_path / "pyproject.toml").touch()
    tool(tmp_path / "other-python", 0)
    tool(tmp_path / "env/bin/python", 0 if works else 1)
    for name in ("pip", "uv"):
        tool(tmp_path / "env/bin" / name, 0)
    settings = ("VENV=env", "EXTRA=", f"PYTHON={tmp_path / 'other-python'}")
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "env/.serve", *settings]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert ("other-python -m venv --clear env" in calls.read_text()) == (not works)
