"""The advice of a starting engine: one line for each thing that would make it faster."""

from __future__ import annotations

import os

import pytest

from chairlift.engine.cpu.blas import BlasReport
from chairlift.engine.cpu.compiled import amx_matmul, compiled_matmul
from chairlift.engine.device import profile
from chairlift.engine.process import diagnosis
from chairlift.engine.process.diagnosis import diagnose, speed_advice


@pytest.mark.parametrize("device", [profile.CPU, profile.CUDA, profile.METAL])
def test_advice_is_a_line_for_each_finding(
    device: profile.DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "current", lambda: device)
    monkeypatch.setattr(diagnosis, "_ENOUGH_FILES", 1 << 40)
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    advice = speed_advice(BlasReport(warning="it is slow"))
    assert all(line.count("\n") == 0 and ": " in line for line in advice)
    # A busy CPU does not slow a GPU's products down, but every server needs files.
    assert any(line.startswith("cores: ") for line in advice) == device.on_cpu
    assert any("ulimit -n" in line for line in advice)


def test_a_cpu_without_matrix_units_is_advised_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_matmul, "available", lambda: False)
    monkeypatch.setattr(amx_matmul, "has_units", lambda: False)
    monkeypatch.setattr(diagnosis.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiled_matmul, "available", lambda: True)
    assert diagnosis._matrix_units().advice is None
    monkeypatch.setattr(compiled_matmul, "available", lambda: False)
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    assert "llvmlite" in str(diagnosis._matrix_units().advice)
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: object())
    assert diagnosis._matrix_units().advice is None


def test_advice_is_a_part_of_the_doctors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    blas = BlasReport(warning="it is slow")
    monkeypatch.setattr(diagnosis, "load_fast_blas", lambda: blas)
    doctors = {f"{each.topic}: {each.advice}" for each in diagnose("127.0.0.1", 0)}
    assert {*speed_advice(blas)} <= doctors
