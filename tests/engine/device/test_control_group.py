"""The memory limits of control groups bound the memory that counts as free."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.engine.device import memory
from chairlift.engine.device.control_group import GroupMemory, group_memory


def _group(folder: Path, limit: str, usage: int, files: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "total_" if version == 1 else ""
    limit_name, usage_name = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\n{prefix}active_file {files // 2}\n{prefix}inactive_file {files - files // 2}\n"
    )


def _process(folder: Path, text: str) -> Path:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(text)
    return folder / "proc"


def test_the_least_limit_and_the_least_free_memory_count(tmp_path: Path) -> None:
    proc, cgroups = _process(tmp_path, "0::/outer/inner\n"), tmp_path / "cgroup"
    assert group_memory(proc, cgroups) is None
    _group(cgroups / "outer" / "inner", "max", 10, 0)
    assert group_memory(proc, cgroups) is None
    _group(cgroups / "outer", "1000", 700, 300)
    assert group_memory(proc, cgroups) == GroupMemory(1000, 600)
    # The inner group may use less, but the outer one has less left.
    _group(cgroups / "outer" / "inner", "900", 100, 0)
    assert group_memory(proc, cgroups) == GroupMemory(900, 600)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    proc, cgroups = _process(tmp_path, "0::/docker/0123\n"), tmp_path / "cgroup"
    _group(cgroups, "1000", 1200, 100)
    assert group_memory(proc, cgroups) == GroupMemory(1000, 0)


def test_version_1_has_a_hierarchy_for_memory(tmp_path: Path) -> None:
    proc, cgroups = _process(tmp_path, "4:memory:/a\n1:cpu:/b\n0::/\n"), tmp_path / "cgroup"
    _group(cgroups / "memory" / "a", "1000", 300, 100, version=1)
    _group(cgroups / "memory", str((1 << 63) - 4096), 10**9, 0, version=1)
    assert group_memory(proc, cgroups) == GroupMemory(1000, 800)


def test_free_memory_is_bounded_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "group_memory", lambda: GroupMemory(2000, 500))
    assert (memory.total_host_memory(), memory.free_host_memory()) == (2000, 500)
    monkeypatch.setattr(memory, "group_memory", lambda: None)
    assert memory.free_host_memory() > 2000
